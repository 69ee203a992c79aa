// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A driver for tests: the part of libcuda that the loader calls, on host memory, recording every launch.
// Built as libcuda.so.1 and found through LD_LIBRARY_PATH; cuda-python then works on it as on the real one.
// It reads the parameter list of PTX text, so that a launch records the bytes of each parameter.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_PTX = 218, INVALID_CONTEXT = 201, NOT_FOUND = 500, CAPTURING = 900 };
enum { DEVICES = 2, MAX_PARAMS = 64, MAX_LAUNCHES = 256 };

typedef struct { char name[64]; int params; int offset[MAX_PARAMS]; int size[MAX_PARAMS]; } Kernel;
typedef struct { char *text; Kernel kernels[8]; int count; } Library;
typedef struct { int device; } Context;
typedef struct { Context *context; } Stream;

typedef struct {
  uint32_t shape[7];
  uint64_t stream;
  int32_t device;
  uint32_t attributes;
  uint8_t attribute[4][72];
  char kernel[64];
  int32_t bytes;
  uint8_t params[1024];
} Launch;

static Context contexts[DEVICES] = {{0}, {1}}, others[DEVICES] = {{0}, {1}};
static __thread Context *current;
static __thread int capture_mode;  // 0 global, 2 relaxed
static int capturing, fail_next, needs_context, allocated, freed, libraries, functions;
static int shared_limit[DEVICES], non_portable[DEVICES];
static Launch launches[MAX_LAUNCHES];
static int launched;

static int setting(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

// --- for the tests

int fake_launches(void) { return launched; }
void *fake_launch(int i) { return &launches[i % MAX_LAUNCHES]; }
int fake_launch_bytes(void) { return sizeof(Launch); }
void fake_reset(void) { launched = 0; fail_next = capturing = needs_context = 0; current = 0; }
void fake_fail(int code) { fail_next = code; }
void fake_capturing(int on) { capturing = on; }
void fake_needs_context(int on) { needs_context = on; }
int fake_count(const char *what) {
  if (!strcmp(what, "allocated")) return allocated;
  if (!strcmp(what, "freed")) return freed;
  if (!strcmp(what, "libraries")) return libraries;
  if (!strcmp(what, "functions")) return functions;
  if (!strcmp(what, "shared0")) return shared_limit[0];
  if (!strcmp(what, "non_portable0")) return non_portable[0];
  return -1;
}
void *fake_stream(int device) {
  Stream *s = malloc(sizeof *s);
  s->context = &contexts[device];
  return s;
}
void *fake_context(int device) { return &others[device]; }

// --- the driver

int cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
  static void *self;
  (void)flags;
  if (!self) {
    Dl_info info;
    dladdr((void *)cuGetProcAddress_v2, &info);
    self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  // cuKernelGetParamInfo came with 12.4: an older driver lacks it.
  int old = setting("FAKE_VERSION", 13000) < 12040 && !strcmp(symbol, "cuKernelGetParamInfo");
  *found = old ? 0 : strcmp(symbol, "cuGetProcAddress") ? dlsym(self, symbol) : (void *)cuGetProcAddress_v2;
  if (status) *status = *found ? 0 : 1;
  (void)version;
  return *found ? 0 : NOT_FOUND;
}
int cuInit(unsigned flags) { (void)flags; return setting("FAKE_INIT", 0); }
int cuDriverGetVersion(int *version) { *version = setting("FAKE_VERSION", 13000); return 0; }
int cuGetErrorName(int code, const char **name) {
  *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 100 ? "CUDA_ERROR_NO_DEVICE"
        : code == 218 ? "CUDA_ERROR_INVALID_PTX" : code == 500 ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int code, const char **text) { (void)code; *text = "as the fake driver says"; return 0; }
int cuDeviceGetCount(int *count) { *count = setting("FAKE_DEVICES", DEVICES); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, "Fake %c", 'A' + device);
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case 75: *value = device == 0 ? 9 : 8; return 0;                     // compute capability, major
  case 76: *value = 0; return 0;                                        // and minor
  case 16: *value = 132; return 0;                                      // multiprocessors
  case 1: *value = 1024; return 0;                                      // threads a block
  case 10: *value = 32; return 0;                                       // warp
  case 97: *value = 232448; return 0;                                   // shared memory, opt-in
  case 38: *value = 60 << 20; return 0;                                 // L2
  case 5: *value = 2147483647; return 0;                                // grid x
  case 6: case 7: *value = 65535; return 0;                             // grid y, z
  }
  return INVALID_VALUE;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxGetDevice(int *device) {
  if (!current) return INVALID_CONTEXT;
  *device = current->device;
  return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = fake_stream(current->device); return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuStreamDestroy(void *stream) { free(stream); return 0; }
int cuStreamSynchronize(void *stream) { (void)stream; return 0; }
int cuStreamGetCtx(void *stream, void **context) { *context = ((Stream *)stream)->context; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
int cuMemAlloc(uint64_t *address, size_t size) {
  if (capturing && capture_mode != 2) return CAPTURING;
  if (!current) return INVALID_CONTEXT;
  void *p = aligned_alloc(256, (size + 255) / 256 * 256);
  memset(p, 0xee, size);
  *address = (uint64_t)p;
  allocated++;
  return 0;
}
int cuMemFree(uint64_t address) { free((void *)address); freed++; return 0; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t n, void *stream) {
  (void)stream;
  memset((void *)address, value, n);
  return 0;
}

static void parse_kernel(Kernel *k, const char *at) {
  const char *open = strchr(at, '('), *end = strchr(at, ')');
  size_t length = strcspn(at, " (\n");
  memcpy(k->name, at, length);
  int offset = 0;
  for (const char *p = open; (p = strstr(p, ".param")) && p < end;) {
    p += 6;
    const char *stop = p + strcspn(p, ",)");
    int alignment = 0, bits = 8, count = 1;
    for (const char *q = p; q < stop; q++) {
      if (!strncmp(q, ".ptr", 4)) break;  // what follows speaks of the memory pointed to
      if (!strncmp(q, ".align ", 7)) alignment = atoi(q + 7);
      if (*q == '.' && strchr("bufs", q[1]) && q[2] >= '0' && q[2] <= '9') bits = atoi(q + 2);
      if (*q == '[') count = atoi(q + 1);
    }
    int size = bits / 8 * count;
    if (!alignment) alignment = size;
    offset = (offset + alignment - 1) / alignment * alignment;
    k->offset[k->params] = offset;
    k->size[k->params++] = size;
    offset += size;
  }
}
int cuLibraryLoadData(void **library, const void *code, int *options, void **values, unsigned count, void *lo, void *lv,
                      unsigned ln) {
  (void)lo, (void)lv, (void)ln;
  const char *text = code;
  if (!strncmp(text, "\x7f" "ELF", 4)) text += 4;  // a fake cubin is PTX text behind an ELF's first bytes
  if (strstr(text, "syntax error")) {
    for (unsigned i = 0; i < count; i++)
      if (options[i] == 5) strcpy(values[i], "ptxas: line 7: a syntax error");  // CU_JIT_ERROR_LOG_BUFFER
    return INVALID_PTX;
  }
  for (unsigned i = 0; i < count; i++)
    if (options[i] == 3 && strstr(text, "poorly"))  // CU_JIT_INFO_LOG_BUFFER
      strcpy(values[i], "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a test");
  if (strstr(text, "\t.loc\t")) {  // the lines are dropped unless CU_JIT_GENERATE_LINE_INFO asks for them
    int asked = 0;
    for (unsigned i = 0; i < count; i++) asked |= options[i] == 13 && values[i] == (void *)1;
    if (!asked) return INVALID_PTX;
  }
  Library *l = calloc(1, sizeof *l);
  for (const char *p = text; (p = strstr(p, ".entry ")); ) parse_kernel(&l->kernels[l->count++], p += 7);
  *library = l;
  libraries++;
  return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  Library *l = library;
  for (int i = 0; i < l->count; i++)
    if (!strcmp(l->kernels[i].name, name)) return *kernel = &l->kernels[i], 0;
  return NOT_FOUND;
}
int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; functions++; return current ? 0 : INVALID_CONTEXT; }
int cuKernelGetParamInfo(void *kernel, size_t i, size_t *offset, size_t *size) {
  Kernel *k = kernel;
  if (i >= (size_t)k->params) return INVALID_VALUE;
  *offset = k->offset[i];
  *size = k->size[i];
  return 0;
}
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)kernel, (void)device;
  static const int values[] = {1024, 4096, 0, 16, 40};  // threads, static shared, const, local, registers
  *value = attribute < 5 ? values[attribute] : 0;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  (void)kernel;
  if (attribute == 8) shared_limit[device] = value;
  if (attribute == 14) non_portable[device] = value;
  return 0;
}
int cuLaunchKernelEx(const void *config, void *kernel, void **params, void **extra) {
  const uint8_t *c = config;
  Kernel *k = kernel;
  uint64_t stream, attributes;
  (void)extra;
  if (fail_next) { int code = fail_next; fail_next = 0; return code; }
  memcpy(&stream, c + 32, 8);
  if (!current && (stream <= 2 || needs_context)) return INVALID_CONTEXT;
  // Threads launch at once in one test: take a slot atomically.
  Launch *l = &launches[__atomic_fetch_add(&launched, 1, __ATOMIC_SEQ_CST) % MAX_LAUNCHES];
  memset(l, 0, sizeof *l);
  memcpy(l->shape, c, 28);
  l->stream = stream;
  l->device = stream > 2 ? ((Stream *)stream)->context->device : current->device;
  memcpy(&attributes, c + 40, 8);
  memcpy(&l->attributes, c + 48, 4);
  memcpy(l->attribute, (void *)attributes, 72 * l->attributes);
  strcpy(l->kernel, k->name);
  for (int i = 0; i < k->params; i++) memcpy(l->params + k->offset[i], params[i], k->size[i]);
  l->bytes = k->params ? k->offset[k->params - 1] + k->size[k->params - 1] : 0;
  return 0;
}
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2, int fill) {
  // Recorded as plain numbers, for the test to read back.
  uint64_t *out = map;
  memset(map, 0, 128);
  out[0] = (uint64_t)address;
  out[1] = (uint64_t)type | (uint64_t)rank << 8 | (uint64_t)interleave << 16 | (uint64_t)swizzle << 24 | (uint64_t)l2 << 32 |
           (uint64_t)fill << 40;
  for (unsigned i = 0; i < rank; i++) {
    out[2 + i] = dims[i];
    if (i + 1 < rank) out[7 + i] = strides[i];
    ((uint32_t *)(out + 11))[i] = box[i];
    if (steps[i] != 1) return INVALID_VALUE;
  }
  return 0;
}
