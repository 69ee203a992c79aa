// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Operands of a call as numbers: everything of them that checks and code look at, and apart from that the addresses of
// buffers. For launches.cpp, whose table is by these numbers.
#ifndef KVARN_RUNTIME_OPERANDS_H
#define KVARN_RUNTIME_OPERANDS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
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

// --- memory --------------------------------------------------------------------------------------

// std::allocator asks for a newer C++ library than the systems have that a wheel is for.
template <typename T>
struct Memory {
  using value_type = T;

  Memory() = default;
  template <typename U>
  Memory(const Memory<U> &) {}
  T *allocate(size_t count) {
    void *found = PyMem_Malloc(count * sizeof(T));
    if (!found)
      Py_FatalError("no memory for a table of launches");
    return static_cast<T *>(found);
  }
  void deallocate(T *memory, size_t) { PyMem_Free(memory); }
  template <typename U>
  bool operator==(const Memory<U> &) const {
    return true;
  }
  template <typename U>
  bool operator!=(const Memory<U> &) const {
    return false;
  }
};

template <typename T>
using Vector = std::vector<T, Memory<T>>;

// --- operands ------------------------------------------------------------------------------------

// As in kvarn.runtime.quick.
enum Kind : uint64_t { Other, Tensor, Handle, Nothing, Integer, Real, Truth, Text, Mapping };
constexpr size_t MaxWords = 768, MaxOperands = 64, MaxRank = 8, MaxClasses = 256;

struct Class {
  Kind kind;
  const ExchangeTable *table;
};

using Classes = std::unordered_map<PyObject *, Class, std::hash<PyObject *>, std::equal_to<PyObject *>,
                                   Memory<std::pair<PyObject *const, Class>>>;
// What operands are read with: how those of a class are, and the specs that stand for those equal to them.
struct Reader {
  PyObject *classify, *specs;
  Classes classes;
  PyObject *lastType = nullptr; // of classes: most operands of a call have the class of the one before
  Class last = {};

  ~Reader() {
    for (auto &each : classes)
      Py_DECREF(each.first);
    Py_DECREF(classify);
    Py_DECREF(specs);
  }
};

PyObject *nameFields, *nameSpec, *nameReadonly, *nameDevice, *nameIsNeg, *nameAcquire, *nameRelease, *nameWords,
    *nameMemory;

// The key of a call under construction, and the address of each operand that has one.
struct Call {
  uint64_t words[MaxWords];
  uint64_t addresses[MaxOperands]; // of the operands that are read
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
    constexpr uint64_t Odd = 0xff51afd7ed558ccdu;
    uint64_t a = 0x9e3779b97f4a7c15u, b = 1, c = 2, found = 0; // independent, since a product takes some cycles
    size_t i = 0;
    for (; i + 3 <= count; i += 3) {
      a = (a ^ words[i]) * Odd;
      b = (b ^ words[i + 1]) * Odd;
      c = (c ^ words[i + 2]) * Odd;
    }
    for (; i < count; i++)
      a = (a ^ words[i]) * Odd;
    for (uint64_t part : {a, b, c}) {
      found = (found ^ part ^ part >> 32) * Odd;
      found ^= found >> 32;
    }
    return found;
  }
};

// Every function that reads an operand gives false where the call is not one for here: the caller then takes the long
// way, which checks the operands and says what is wrong with them.

Class classOf(Reader &reader, PyObject *operand) {
  PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(operand));
  if (type == reader.lastType)
    return reader.last;
  auto found = reader.classes.find(type);
  if (found != reader.classes.end()) {
    reader.lastType = type;
    return reader.last = found->second;
  }
  PyObject *answer = PyObject_CallFunctionObjArgs(reader.classify, type, nullptr);
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
  if (reader.classes.size() >= MaxClasses) {
    Classes gone;
    reader.classes.swap(gone);
    reader.lastType = nullptr;
    for (auto &each : gone)
      Py_DECREF(each.first);
  }
  if (reader.classes.emplace(type, made).second)
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
bool readSpec(Reader &reader, PyObject *operand, Call &call) {
  PyObject *spec = PyObject_GetAttr(operand, nameSpec);
  if (!spec)
    return false;
  PyObject *number = PyLong_FromVoidPtr(spec);
  Py_DECREF(spec); // the operand keeps it
  if (!number)
    return false;
  PyObject *found = PyDict_GetItemWithError(reader.specs, number);
  Py_DECREF(number);
  if (!found || PyTuple_GetItem(found, 0) != spec)
    return false;
  return call.add(reinterpret_cast<uint64_t>(PyTuple_GetItem(found, 1)));
}

// All of a handle but its words, which are kept with it.
bool describeHandle(Reader &reader, PyObject *operand, Call &call) {
  PyObject *readonly = PyObject_GetAttr(operand, nameReadonly);
  if (!readonly)
    return false;
  Py_DECREF(readonly); // True or False, which stay
  if ((readonly != Py_True && readonly != Py_False) || !readDevice(operand, call) || !readSpec(reader, operand, call))
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

// Whether the tensor of a handle's pool is where it was: it may have been given other memory, or none.
bool isInPlace(Reader &reader, PyObject *memory) {
  if (!PyTuple_Check(memory)) // no tensor
    return true;
  PyObject *tensor = PyTuple_GetItem(memory, 0);
  Class is = classOf(reader, tensor);
  DLTensor found;
  return is.kind == Tensor && !is.table->read(tensor, &found) &&
         reinterpret_cast<uint64_t>(found.data) + found.byteOffset ==
             PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(memory, 1));
}

// A handle does not change: its ordinal and its part of the key are bytes in an attribute, with the memory of its pool;
// None before it is first read.
bool readHandle(Reader &reader, PyObject *operand, Call &call) {
  PyObject *kept = PyObject_GetAttr(operand, nameWords);
  if (!kept)
    PyErr_Clear(); // of a class that keeps nothing
  if (kept && PyTuple_Check(kept)) {
    PyObject *words = PyTuple_GetItem(kept, 0);
    size_t size = static_cast<size_t>(PyBytes_Size(words));
    bool good = size >= 8 && size % 8 == 0 && call.count + size / 8 <= MaxWords;
    if (good) {
      const char *bytes = PyBytes_AsString(words);
      int64_t ordinal;
      std::memcpy(&ordinal, bytes, 8);
      std::memcpy(call.words + call.count, bytes + 8, size - 8);
      call.count += size / 8 - 1;
      good = call.on(ordinal) && isInPlace(reader, PyTuple_GetItem(kept, 1));
    }
    Py_DECREF(kept);
    return good;
  }
  Py_XDECREF(kept); // None
  size_t first = call.count;
  if (!call.add(0) || !describeHandle(reader, operand, call))
    return false;
  call.words[first] = static_cast<uint64_t>(call.ordinal);
  Py_ssize_t size = static_cast<Py_ssize_t>(8 * (call.count - first));
  PyObject *memory = kept ? PyObject_GetAttr(operand, nameMemory) : nullptr;
  PyObject *made = memory ? Py_BuildValue("(y#N)", call.words + first, size, memory) : nullptr;
  if (kept && (!made || PyObject_SetAttr(operand, nameWords, made)))
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

bool readOperand(Reader &reader, PyObject *operand, Call &call, uint64_t &address);

// A schedule: names and numbers, in their order.
bool readMapping(Reader &reader, PyObject *operand, Call &call) {
  if (!call.add(Mapping | static_cast<uint64_t>(PyDict_Size(operand)) << 8))
    return false;
  PyObject *name, *value;
  Py_ssize_t place = 0;
  uint64_t none;
  while (PyDict_Next(operand, &place, &name, &value)) {
    bool plain = value == Py_True || value == Py_False || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
                 PyUnicode_CheckExact(value);
    if (!plain || !PyUnicode_CheckExact(name) || !readText(name, call) || !readOperand(reader, value, call, none))
      return false;
  }
  return true;
}

bool readOperand(Reader &reader, PyObject *operand, Call &call, uint64_t &address) {
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
  if (PyDict_CheckExact(operand))
    return readMapping(reader, operand, call);
  Class is = classOf(reader, operand);
  if (is.kind == Tensor)
    return readTensor(is, operand, call, address);
  return is.kind == Handle && readHandle(reader, operand, call);
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

} // namespace

#endif
