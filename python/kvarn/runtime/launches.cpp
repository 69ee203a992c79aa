// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls like one before, launched with one call of C: kvarn.runtime._launches, which kvarn.runtime.quick makes use of.
//
// A table holds the packed launches of calls by a key of numbers: everything of each argument but the addresses of
// buffers. A call whose key is there copies the packets, writes its addresses into them and launches. Tensors are read
// by DLPack's exchange table (__dlpack_c_exchange_api__ of their class), which makes no object. The stable ABI of
// Python 3.10 makes one build serve every later Python; there are no headers of CUDA, whose two functions come as
// addresses.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

// --- DLPack 1.1 ----------------------------------------------------------------------------------

struct DLTensor {
  void *data;
  int32_t deviceType, deviceId, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byteOffset;
};

struct ExchangeTable {
  uint32_t major, minor;
  void *previous;
  void *allocate, *exportManaged, *importManaged;
  int (*read)(void *object, DLTensor *out);
  int (*currentStream)(int deviceType, int32_t deviceId, void **out);
};

constexpr int CudaDevice = 2, FloatCode = 2;
constexpr const char *CapsuleName = "dlpack_exchange_api";

// --- a table -------------------------------------------------------------------------------------

// As in kvarn.runtime.quick.
enum Kind : uint64_t { Other, Tensor, Handle, Nothing, Integer, Real, Truth, Text };
constexpr size_t MaxWords = 768, MaxOperands = 64, MaxRank = 8, MaxRecords = 1024, MaxClasses = 256;
constexpr size_t MaxBytes = 4608, MaxParameters = 512; // of a packet: a launch configuration and 4 KiB of parameters
constexpr int NoContext = 201;                         // CUDA_ERROR_INVALID_CONTEXT

struct Class {
  Kind kind;
  const ExchangeTable *table;
};

struct Move {
  uint32_t offset, operand;
};

struct Step {
  void *kernel;
  std::vector<uint8_t> packet; // begins with the launch configuration
  std::vector<uint32_t> parameters;
  std::vector<Move> moves;
  PyObject *again;
};

struct Record {
  std::vector<uint64_t> key;
  PyObject *attributes, *schedule, *lock;
  void *context;
  std::vector<Step> steps;

  Record(const uint64_t *words, size_t count, PyObject *a, PyObject *s, PyObject *l, void *c)
      : key(words, words + count), attributes(a), schedule(s), lock(l), context(c) {
    Py_INCREF(attributes);
    Py_INCREF(schedule);
    Py_INCREF(lock);
  }
  Record(const Record &) = delete;
  ~Record() {
    Py_DECREF(attributes);
    Py_DECREF(schedule);
    Py_DECREF(lock);
    for (Step &step : steps)
      Py_DECREF(step.again);
  }
};

using LaunchFunction = int (*)(void *config, void *kernel, void **parameters, void **extra);
using ContextFunction = int (*)(void **context);

struct Table {
  PyObject_HEAD LaunchFunction launch;
  ContextFunction current;
  PyObject *classify, *specs;
  std::unordered_map<PyObject *, Class> *classes;
  std::unordered_multimap<uint64_t, std::shared_ptr<Record>> *records;
};

PyObject *nameFields, *nameSpec, *nameReadonly, *nameDevice, *nameIsNeg, *nameAcquire, *nameRelease, *nameWords;

// The key of a call under construction, and the address of each operand that has one.
struct Call {
  uint64_t words[MaxWords];
  uint64_t addresses[MaxOperands] = {};
  size_t count = 0;
  int64_t ordinal = -1;
  const ExchangeTable *table = nullptr;

  bool add(uint64_t word) {
    if (count == MaxWords)
      return false;
    words[count++] = word;
    return true;
  }
  bool on(int64_t device) {
    if (ordinal >= 0 && ordinal != device)
      return false;
    ordinal = device;
    return true;
  }
  uint64_t hash() const {
    uint64_t found = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < count; i++) {
      found = (found ^ words[i]) * 0xff51afd7ed558ccdu;
      found ^= found >> 32;
    }
    return found;
  }
};

// Every function that reads an operand gives false where the call is not one for here: the caller then takes the long
// way, which checks the operands and says what is wrong with them.

Class classOf(Table *self, PyObject *operand) {
  PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(operand));
  auto found = self->classes->find(type);
  if (found != self->classes->end())
    return found->second;
  PyObject *answer = PyObject_CallFunctionObjArgs(self->classify, type, nullptr);
  if (!answer)
    return {Other, nullptr};
  Class made{static_cast<Kind>(PyLong_AsUnsignedLongMask(answer)), nullptr};
  Py_DECREF(answer);
  if (PyErr_Occurred())
    return {Other, nullptr};
  if (made.kind == Tensor) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    made.table = capsule ? static_cast<ExchangeTable *>(PyCapsule_GetPointer(capsule, CapsuleName)) : nullptr;
    Py_XDECREF(capsule);
    if (!made.table || made.table->major != 1 || !made.table->read || !made.table->currentStream)
      made.kind = Other;
    PyErr_Clear();
  }
  if (self->classes->size() >= MaxClasses) {
    std::unordered_map<PyObject *, Class> gone;
    self->classes->swap(gone);
    for (auto &each : gone)
      Py_DECREF(each.first);
  }
  if (self->classes->emplace(type, made).second)
    Py_INCREF(type);
  return made;
}

bool readTensor(const Class &is, PyObject *operand, Call &call, uint64_t &address) {
  DLTensor found;
  if (is.table->read(operand, &found))
    return false;
  if (found.deviceType != CudaDevice || !found.data || !found.strides || found.ndim < 0 ||
      found.ndim > static_cast<int32_t>(MaxRank) || !call.on(found.deviceId))
    return false;
  // Lazily negated tensors hold the values with the other sign: imaginary parts of complex ones, so of these widths.
  if (found.code == FloatCode && (found.bits == 16 || found.bits == 32 || found.bits == 64)) {
    PyObject *negated = PyObject_CallMethodObjArgs(operand, nameIsNeg, nullptr);
    if (!negated)
      return false;
    Py_DECREF(negated);
    if (negated != Py_False)
      return false;
  }
  address = reinterpret_cast<uint64_t>(found.data) + found.byteOffset;
  call.table = is.table;
  if (!call.add(Tensor | static_cast<uint64_t>(found.ndim) << 8 | (address & 15) << 16 |
                static_cast<uint64_t>(found.code) << 24 | static_cast<uint64_t>(found.bits) << 32 |
                static_cast<uint64_t>(found.lanes) << 40))
    return false;
  for (int i = 0; i < found.ndim; i++)
    if (!call.add(static_cast<uint64_t>(found.shape[i])) || !call.add(static_cast<uint64_t>(found.strides[i])))
      return false;
  return true;
}

bool readDevice(PyObject *operand, Call &call) {
  PyObject *device = PyObject_GetAttr(operand, nameDevice);
  if (!device)
    return false;
  bool good = PyTuple_Check(device) && PyTuple_Size(device) == 2;
  if (good) {
    PyObject *kind = PyTuple_GetItem(device, 0), *number = PyTuple_GetItem(device, 1);
    good = PyUnicode_Check(kind) && !PyUnicode_CompareWithASCIIString(kind, "cuda") && PyLong_Check(number);
    good = good && call.on(PyLong_AsLong(number));
  }
  Py_DECREF(device);
  return good;
}

// Equal specs share an identity: that of the first, which kvarn.runtime.signatures keeps.
bool readSpec(Table *self, PyObject *operand, Call &call) {
  PyObject *spec = PyObject_GetAttr(operand, nameSpec);
  if (!spec)
    return false;
  PyObject *number = PyLong_FromVoidPtr(spec);
  Py_DECREF(spec); // the operand keeps it
  if (!number)
    return false;
  PyObject *found = PyDict_GetItemWithError(self->specs, number);
  Py_DECREF(number);
  if (!found || PyTuple_GetItem(found, 0) != spec)
    return false;
  return call.add(reinterpret_cast<uint64_t>(PyTuple_GetItem(found, 1)));
}

// All of a handle but its words, which are kept with it.
bool describeHandle(Table *self, PyObject *operand, Call &call) {
  PyObject *readonly = PyObject_GetAttr(operand, nameReadonly);
  if (!readonly)
    return false;
  Py_DECREF(readonly); // True or False, which stay
  if ((readonly != Py_True && readonly != Py_False) || !readDevice(operand, call) || !readSpec(self, operand, call))
    return false;
  PyObject *fields = PyObject_CallMethodObjArgs(operand, nameFields, nullptr);
  if (!fields)
    return false;
  bool good = PyTuple_Check(fields);
  Py_ssize_t count = good ? PyTuple_Size(fields) : 0;
  good = good && call.add(Handle | static_cast<uint64_t>(count) << 8 | (readonly == Py_True ? 1u << 7 : 0));
  for (Py_ssize_t i = 0; good && i < count; i++) {
    uint64_t field = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(fields, i));
    good = call.add(field) && (field != ~uint64_t(0) || !PyErr_Occurred());
  }
  Py_DECREF(fields);
  return good;
}

// A handle does not change: its ordinal and its part of the key are bytes in an attribute, None before it is first
// read.
bool readHandle(Table *self, PyObject *operand, Call &call) {
  PyObject *kept = PyObject_GetAttr(operand, nameWords);
  if (!kept)
    PyErr_Clear(); // of a class that keeps nothing
  if (kept && PyBytes_Check(kept)) {
    size_t size = static_cast<size_t>(PyBytes_Size(kept));
    bool good = size >= 8 && size % 8 == 0 && call.count + size / 8 <= MaxWords;
    if (good) {
      const char *bytes = PyBytes_AsString(kept);
      int64_t ordinal;
      std::memcpy(&ordinal, bytes, 8);
      std::memcpy(call.words + call.count, bytes + 8, size - 8);
      call.count += size / 8 - 1;
      good = call.on(ordinal);
    }
    Py_DECREF(kept);
    return good;
  }
  Py_XDECREF(kept); // None
  size_t first = call.count;
  if (!call.add(0) || !describeHandle(self, operand, call))
    return false;
  call.words[first] = static_cast<uint64_t>(call.ordinal);
  Py_ssize_t size = static_cast<Py_ssize_t>(8 * (call.count - first));
  PyObject *made = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(call.words + first), size);
  if (!made || (kept && PyObject_SetAttr(operand, nameWords, made)))
    PyErr_Clear();
  Py_XDECREF(made);
  std::memmove(call.words + first, call.words + first + 1, 8 * (--call.count - first));
  return true;
}

bool readText(PyObject *operand, Call &call) {
  Py_ssize_t size;
  const char *text = PyUnicode_AsUTF8AndSize(operand, &size);
  size_t words = static_cast<size_t>(size + 7) / 8;
  if (!text || call.count + words >= MaxWords)
    return false;
  call.add(Text | static_cast<uint64_t>(size) << 8);
  std::memset(call.words + call.count, 0, 8 * words);
  std::memcpy(call.words + call.count, text, static_cast<size_t>(size));
  call.count += words;
  return true;
}

bool readOperand(Table *self, PyObject *operand, Call &call, uint64_t &address) {
  if (operand == Py_None)
    return call.add(Nothing);
  if (PyLong_CheckExact(operand)) {
    int overflow;
    int64_t value = PyLong_AsLongLongAndOverflow(operand, &overflow);
    return !overflow && call.add(Integer) && call.add(static_cast<uint64_t>(value));
  }
  if (PyFloat_CheckExact(operand)) {
    double value = PyFloat_AsDouble(operand);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return call.add(Real) && call.add(bits);
  }
  if (operand == Py_True || operand == Py_False)
    return call.add(Truth | (operand == Py_True ? 1u << 8 : 0));
  if (PyUnicode_CheckExact(operand))
    return readText(operand, call);
  Class is = classOf(self, operand);
  if (is.kind == Tensor)
    return readTensor(is, operand, call, address);
  return is.kind == Handle && readHandle(self, operand, call);
}

bool readStream(PyObject *given, Call &call) {
  void *stream = nullptr;
  if (given == Py_None) {
    if (!call.table || call.table->currentStream(CudaDevice, static_cast<int32_t>(call.ordinal), &stream))
      return false;
  } else {
    stream = PyLong_AsVoidPtr(given);
    if (!stream && PyErr_Occurred())
      return false;
  }
  return call.add(static_cast<uint64_t>(call.ordinal)) && call.add(reinterpret_cast<uint64_t>(stream));
}

std::shared_ptr<Record> find(Table *self, const Call &call, PyObject *attributes, PyObject *schedule) {
  auto range = self->records->equal_range(call.hash());
  std::vector<std::shared_ptr<Record>> others; // comparing runs Python, which may change the table: it comes afterwards
  for (auto each = range.first; each != range.second; ++each) {
    const Record &record = *each->second;
    if (record.key.size() != call.count || std::memcmp(record.key.data(), call.words, 8 * call.count))
      continue;
    if (record.attributes == attributes && record.schedule == schedule)
      return each->second;
    others.push_back(each->second);
  }
  for (const auto &record : others) {
    int same = PyObject_RichCompareBool(record->attributes, attributes, Py_EQ);
    same = same > 0 ? PyObject_RichCompareBool(record->schedule, schedule, Py_EQ) : same;
    if (same)
      return same > 0 ? record : nullptr;
  }
  return nullptr;
}

// Threads may launch one record at once: each has a copy of the packet.
int fire(LaunchFunction launch, const Step &step, const uint64_t *addresses) {
  alignas(64) uint8_t packet[MaxBytes];
  void *parameters[MaxParameters];
  std::memcpy(packet, step.packet.data(), step.packet.size());
  for (Move move : step.moves)
    std::memcpy(packet + move.offset, &addresses[move.operand], 8);
  for (size_t i = 0; i < step.parameters.size(); i++)
    parameters[i] = packet + step.parameters[i];
  return launch(packet, step.kernel, parameters, nullptr);
}

PyObject *fireAll(Table *self, const Record &record, const uint64_t *addresses) {
  if (record.context) {
    void *current = nullptr;
    if (self->current(&current) || current != record.context)
      Py_RETURN_NONE;
  }
  if (record.lock != Py_None) { // steps of two calls must not mix
    PyObject *taken = PyObject_CallMethodObjArgs(record.lock, nameAcquire, nullptr);
    if (!taken)
      return nullptr;
    Py_DECREF(taken);
  }
  int code = 0;
  size_t i = 0;
  PyThreadState *state = PyEval_SaveThread(); // a launch waits when the device's queue is full
  for (; i < record.steps.size(); i++)
    if ((code = fire(self->launch, record.steps[i], addresses)))
      break;
  PyEval_RestoreThread(state);
  if (record.lock != Py_None) {
    PyObject *given = PyObject_CallMethodObjArgs(record.lock, nameRelease, nullptr);
    if (!given)
      return nullptr;
    Py_DECREF(given);
  }
  if (!code)
    Py_RETURN_TRUE;
  if (code == NoContext && i == 0) // nothing was launched: the long way makes a context current
    Py_RETURN_NONE;
  PyObject *answer = PyObject_CallFunction(record.steps[i].again, "i", code);
  if (!answer)
    return nullptr;
  Py_DECREF(answer);
  PyErr_Format(PyExc_RuntimeError, "a launch failed with %d", code);
  return nullptr;
}

// --- methods -------------------------------------------------------------------------------------

PyObject *tableLaunch(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Table *self = reinterpret_cast<Table *>(object);
  if (given != 5) {
    PyErr_SetString(PyExc_TypeError, "launch takes operands, attributes, schedule, generation and stream");
    return nullptr;
  }
  PyObject *operands = args[0], *attributes = args[1], *schedule = args[2];
  if (!PyTuple_Check(operands) || PyTuple_Size(operands) > static_cast<Py_ssize_t>(MaxOperands))
    Py_RETURN_NONE;
  size_t count = static_cast<size_t>(PyTuple_Size(operands));
  Call call;
  bool good = call.add(PyLong_AsUnsignedLongLongMask(args[3]));
  size_t values = 0; // operands that are there, by which moves are numbered
  for (size_t i = 0; good && i < count; i++) {
    PyObject *operand = PyTuple_GetItem(operands, static_cast<Py_ssize_t>(i));
    good = readOperand(self, operand, call, call.addresses[values]);
    values += operand != Py_None;
  }
  if (!good || call.ordinal < 0 || !readStream(args[4], call)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  std::shared_ptr<Record> record = find(self, call, attributes, schedule);
  if (record)
    return fireAll(self, *record, call.addresses);
  if (PyErr_Occurred())
    return nullptr;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(call.words), static_cast<Py_ssize_t>(8 * call.count));
}

bool readNumbers(PyObject *items, std::vector<uint32_t> &out) {
  if (!PyTuple_Check(items))
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(items); i++)
    out.push_back(static_cast<uint32_t>(PyLong_AsUnsignedLongMask(PyTuple_GetItem(items, i))));
  return !PyErr_Occurred();
}

bool readStep(PyObject *item, Record &record) {
  PyObject *kernel, *parameters, *offsets, *sources, *again;
  const char *bytes;
  Py_ssize_t size;
  if (!PyTuple_Check(item) ||
      !PyArg_ParseTuple(item, "Oy#OOOO", &kernel, &bytes, &size, &parameters, &offsets, &sources, &again))
    return false;
  Step step{PyLong_AsVoidPtr(kernel), {bytes, bytes + size}, {}, {}, again};
  std::vector<uint32_t> at, of;
  if (PyErr_Occurred() || !readNumbers(parameters, step.parameters) || !readNumbers(offsets, at) ||
      !readNumbers(sources, of))
    return false;
  bool fits = step.packet.size() <= MaxBytes && step.parameters.size() <= MaxParameters && at.size() == of.size();
  for (uint32_t offset : step.parameters)
    fits = fits && offset < step.packet.size();
  for (size_t i = 0; fits && i < at.size(); i++) {
    fits = at[i] + 8 <= step.packet.size() && of[i] < MaxOperands;
    step.moves.push_back({at[i], of[i]});
  }
  if (!fits) {
    PyErr_SetString(PyExc_ValueError, "remember takes packets of 4608 bytes, 512 parameters and 64 operands at most");
    return false;
  }
  Py_INCREF(again);
  record.steps.push_back(std::move(step));
  return true;
}

// What goes may run Python as it does, and must find the table whole.
void forget(Table *self) {
  std::unordered_multimap<uint64_t, std::shared_ptr<Record>> gone;
  self->records->swap(gone);
}

PyObject *tableRemember(PyObject *object, PyObject *args) {
  Table *self = reinterpret_cast<Table *>(object);
  const char *key;
  Py_ssize_t size;
  PyObject *attributes, *schedule, *context, *lock, *steps;
  if (!PyArg_ParseTuple(args, "y#OOOOO", &key, &size, &attributes, &schedule, &context, &lock, &steps))
    return nullptr;
  if (size % 8 || size > static_cast<Py_ssize_t>(8 * MaxWords) || !PyList_Check(steps)) {
    PyErr_SetString(PyExc_ValueError, "remember takes a key that launch returned, and a list of steps");
    return nullptr;
  }
  Call call;
  call.count = static_cast<size_t>(size) / 8;
  std::memcpy(call.words, key, static_cast<size_t>(size));
  void *where = PyLong_AsVoidPtr(context);
  if (PyErr_Occurred())
    return nullptr;
  auto record = std::make_shared<Record>(call.words, call.count, attributes, schedule, lock, where);
  for (Py_ssize_t i = 0; i < PyList_Size(steps); i++)
    if (!readStep(PyList_GetItem(steps, i), *record))
      return nullptr;
  if (self->records->size() >= MaxRecords)
    forget(self);
  self->records->emplace(call.hash(), std::move(record));
  Py_RETURN_NONE;
}

PyObject *tableClear(PyObject *object, PyObject *) {
  forget(reinterpret_cast<Table *>(object));
  Py_RETURN_NONE;
}

Py_ssize_t tableLength(PyObject *object) {
  return static_cast<Py_ssize_t>(reinterpret_cast<Table *>(object)->records->size());
}

PyObject *tableNew(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *launch, *current, *classify, *specs;
  if (!PyArg_ParseTuple(args, "OOOO", &launch, &current, &classify, &specs))
    return nullptr;
  void *functions[] = {PyLong_AsVoidPtr(launch), PyLong_AsVoidPtr(current)};
  if (PyErr_Occurred())
    return nullptr;
  if (!PyDict_Check(specs) || !functions[0] || !functions[1]) {
    PyErr_SetString(PyExc_TypeError, "Launches takes two addresses of functions, a callable and a dict");
    return nullptr;
  }
  allocfunc allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  Table *self = reinterpret_cast<Table *>(allocate(type, 0));
  if (!self)
    return nullptr;
  self->launch = reinterpret_cast<LaunchFunction>(functions[0]);
  self->current = reinterpret_cast<ContextFunction>(functions[1]);
  Py_INCREF(self->classify = classify);
  Py_INCREF(self->specs = specs);
  self->classes = new std::unordered_map<PyObject *, Class>;
  self->records = new std::unordered_multimap<uint64_t, std::shared_ptr<Record>>;
  return reinterpret_cast<PyObject *>(self);
}

void tableFree(PyObject *object) {
  Table *self = reinterpret_cast<Table *>(object);
  PyTypeObject *type = Py_TYPE(object);
  for (auto &each : *self->classes)
    Py_DECREF(each.first);
  delete self->classes;
  delete self->records;
  Py_DECREF(self->classify);
  Py_DECREF(self->specs);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(tableLaunch)), METH_FASTCALL,
     "launch(operands, attributes, schedule, generation, stream): True where it launched, the key of a call that is "
     "not known, or None where the call is not one for here."},
    {"remember", tableRemember, METH_VARARGS,
     "remember(key, attributes, schedule, context, lock, steps): what a call of this key launches from now on."},
    {"clear", tableClear, METH_NOARGS, "Forget all calls."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char *>("Launches(launch, current, classify, specs): packed launches of calls, by key.")},
    {Py_tp_new, reinterpret_cast<void *>(tableNew)},
    {Py_tp_dealloc, reinterpret_cast<void *>(tableFree)},
    {Py_tp_methods, methods},
    {Py_mp_length, reinterpret_cast<void *>(tableLength)},
    {0, nullptr},
};

PyType_Spec spec = {"kvarn.runtime._launches.Launches", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launches", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__launches() {
  struct {
    PyObject **name;
    const char *text;
  } names[] = {{&nameFields, "fields"}, {&nameSpec, "spec"},       {&nameReadonly, "readonly"}, {&nameDevice, "device"},
               {&nameIsNeg, "is_neg"},  {&nameAcquire, "acquire"}, {&nameRelease, "release"},   {&nameWords, "_words"}};
  for (auto &each : names)
    if (!(*each.name = PyUnicode_InternFromString(each.text)))
      return nullptr;
  PyObject *made = PyModule_Create(&module);
  PyObject *type = made ? PyType_FromSpec(&spec) : nullptr;
  if (!type || PyModule_AddObject(made, "Launches", type)) {
    Py_XDECREF(type);
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
}
