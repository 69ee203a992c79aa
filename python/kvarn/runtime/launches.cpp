// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls like one before, launched with one call of C: kvarn.runtime._launches, which kvarn.runtime.quick makes use of.
//
// A table holds the packed launches of calls by a key of numbers: everything of each argument but the addresses of
// buffers. A call whose key is there copies the packets, writes its addresses into them and launches. Tensors are read
// by DLPack's exchange table (__dlpack_c_exchange_api__ of their class), which makes no object. The stable ABI of
// Python 3.10 makes one build serve every later Python; there are no headers of CUDA, whose two functions come as
// addresses.
#include "checks.h"
#include "operands.h"

#include <new>

namespace {

// --- a table -------------------------------------------------------------------------------------

constexpr size_t MaxRecords = 1024;
constexpr size_t MaxBytes = 4608, MaxParameters = 512; // of a packet: a launch configuration and 4 KiB of parameters
constexpr int NoContext = 201;                         // CUDA_ERROR_INVALID_CONTEXT

struct Move {
  uint32_t offset, operand;
};

struct Step {
  void *kernel;
  Vector<uint8_t> packet; // begins with the launch configuration
  Vector<uint32_t> parameters;
  Vector<Move> moves;
  PyObject *again;
};

// The bytes of two buffers may meet where the address of one, less that of the other (or 0), is between two numbers.
struct Meeting {
  uint32_t written, read;
  int64_t low, high;
};

constexpr uint32_t Nowhere = UINT32_MAX; // in place of a buffer: the numbers are addresses

struct Record {
  Vector<uint64_t> key;
  Vector<Meeting> meetings;
  PyObject *attributes, *schedule;
  PyObject *acquire = nullptr, *release = nullptr; // of a lock, where there are several steps
  void *context;
  Vector<Step> steps;
  size_t uses = 1;

  Record(const uint64_t *words, size_t count, PyObject *a, PyObject *s, void *c)
      : key(words, words + count), attributes(a), schedule(s), context(c) {
    Py_INCREF(attributes);
    Py_INCREF(schedule);
  }
  Record(const Record &) = delete;
  ~Record() {
    Py_DECREF(attributes);
    Py_DECREF(schedule);
    Py_XDECREF(acquire);
    Py_XDECREF(release);
    for (Step &step : steps)
      Py_DECREF(step.again);
  }
};

// A record that is in use stays, also when the table forgets it. Counted while the interpreter's lock is held.
class Reference {
  Record *record;

public:
  Reference(Record *made = nullptr) : record(made) {}
  Reference(const Reference &other) : record(other.record) {
    if (record)
      record->uses++;
  }
  Reference(Reference &&other) noexcept : record(other.record) { other.record = nullptr; }
  Reference &operator=(const Reference &) = delete;
  ~Reference() {
    if (record && !--record->uses)
      delete record;
  }
  Record *operator->() const { return record; }
  Record &operator*() const { return *record; }
  explicit operator bool() const { return record; }
};

using LaunchFunction = int (*)(void *config, void *kernel, void **parameters, void **extra);
using ContextFunction = int (*)(void **context);

using Records = std::unordered_multimap<uint64_t, Reference, std::hash<uint64_t>, std::equal_to<uint64_t>,
                                        Memory<std::pair<const uint64_t, Reference>>>;

struct Table {
  PyObject_HEAD;
  LaunchFunction launch;
  ContextFunction current;
  Reader reader;
  Records records;
};

Reference find(Table *self, const Call &call, PyObject *attributes, PyObject *schedule) {
  auto range = self->records.equal_range(call.hash());
  Vector<Reference> others; // comparing runs Python, which may change the table: it comes afterwards
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
  for (const Meeting &m : record.meetings) { // the long way says whether they share memory
    uint64_t from = m.read == Nowhere ? 0 : addresses[m.read];
    int64_t distance = static_cast<int64_t>(addresses[m.written] - from);
    if (m.low < distance && distance < m.high)
      Py_RETURN_NONE;
  }
  if (record.context) {
    void *current = nullptr;
    if (self->current(&current) || current != record.context)
      Py_RETURN_NONE;
  }
  if (record.acquire) { // steps of two calls must not mix
    PyObject *taken = PyObject_CallNoArgs(record.acquire);
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
  if (record.release) {
    PyObject *given = PyObject_CallNoArgs(record.release);
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
  if (!PyTuple_Check(operands) || PyTuple_Size(operands) > static_cast<Py_ssize_t>(MaxOperands) ||
      !PyLong_CheckExact(args[3])) // of other settings than the defaults
    Py_RETURN_NONE;
  size_t count = static_cast<size_t>(PyTuple_Size(operands));
  Call call;
  bool good = call.add(PyLong_AsUnsignedLongLongMask(args[3]));
  size_t values = 0; // operands that are there, by which moves are numbered
  for (size_t i = 0; good && i < count; i++) {
    PyObject *operand = PyTuple_GetItem(operands, static_cast<Py_ssize_t>(i));
    call.addresses[values] = 0;
    good = readOperand(self->reader, operand, call, call.addresses[values]);
    values += operand != Py_None;
  }
  if (!good || call.ordinal < 0 || !readStream(args[4], call)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  Reference record = find(self, call, attributes, schedule);
  if (record)
    return fireAll(self, *record, call.addresses);
  if (PyErr_Occurred())
    return nullptr;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(call.words), static_cast<Py_ssize_t>(8 * call.count));
}

bool readNumbers(PyObject *items, Vector<uint32_t> &out) {
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
  Vector<uint32_t> at, of;
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

bool readMeeting(PyObject *item, Record &record) {
  long long written, read, low, high;
  if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "LLLL", &written, &read, &low, &high))
    return false;
  constexpr long long most = static_cast<long long>(MaxOperands);
  if (written < 0 || written >= most || read < -1 || read >= most) {
    PyErr_SetString(PyExc_ValueError, "remember takes meetings of operands, or of one and of memory");
    return false;
  }
  record.meetings.push_back({static_cast<uint32_t>(written), static_cast<uint32_t>(read), low, high});
  return true;
}

// What goes may run Python as it does, and must find the table whole.
void forget(Table *self) {
  Records gone;
  self->records.swap(gone);
}

PyObject *tableRemember(PyObject *object, PyObject *args) {
  Table *self = reinterpret_cast<Table *>(object);
  const char *key;
  Py_ssize_t size;
  PyObject *attributes, *schedule, *context, *lock, *steps, *meetings = nullptr;
  if (!PyArg_ParseTuple(args, "y#OOOOO|O", &key, &size, &attributes, &schedule, &context, &lock, &steps, &meetings))
    return nullptr;
  if (size % 8 || size > static_cast<Py_ssize_t>(8 * MaxWords) || !PyList_Check(steps) ||
      (meetings && !PyList_Check(meetings))) {
    PyErr_SetString(PyExc_ValueError, "remember takes a key that launch returned, and lists of steps and of meetings");
    return nullptr;
  }
  Call call;
  call.count = static_cast<size_t>(size) / 8;
  std::memcpy(call.words, key, static_cast<size_t>(size));
  void *where = PyLong_AsVoidPtr(context);
  if (PyErr_Occurred())
    return nullptr;
  Reference record(new Record(call.words, call.count, attributes, schedule, where));
  if (lock != Py_None) {
    record->acquire = PyObject_GetAttr(lock, nameAcquire);
    record->release = PyObject_GetAttr(lock, nameRelease);
    if (!record->acquire || !record->release)
      return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_Size(steps); i++)
    if (!readStep(PyList_GetItem(steps, i), *record))
      return nullptr;
  for (Py_ssize_t i = 0; meetings && i < PyList_Size(meetings); i++)
    if (!readMeeting(PyList_GetItem(meetings, i), *record))
      return nullptr;
  if (self->records.size() >= MaxRecords)
    forget(self);
  self->records.emplace(call.hash(), std::move(record));
  Py_RETURN_NONE;
}

PyObject *tableClear(PyObject *object, PyObject *) {
  forget(reinterpret_cast<Table *>(object));
  Py_RETURN_NONE;
}

Py_ssize_t tableLength(PyObject *object) {
  return static_cast<Py_ssize_t>(reinterpret_cast<Table *>(object)->records.size());
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
  Py_INCREF(classify);
  Py_INCREF(specs);
  new (&self->reader) Reader{classify, specs, {}};
  new (&self->records) Records;
  return reinterpret_cast<PyObject *>(self);
}

void tableFree(PyObject *object) {
  Table *self = reinterpret_cast<Table *>(object);
  PyTypeObject *type = Py_TYPE(object);
  self->records.~Records();
  self->reader.~Reader();
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(tableLaunch)), METH_FASTCALL,
     "launch(operands, attributes, schedule, generation, stream): True where it launched, the key of a call that is "
     "not known, or None where the call is not one for here."},
    {"remember", tableRemember, METH_VARARGS,
     "remember(key, attributes, schedule, context, lock, steps, meetings=[]): what a call of this key launches from "
     "now "
     "on, but where buffers meet."},
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

PyMethodDef functions[] = {
    {"check", makeCheck, METH_VARARGS,
     "check(function, conditions): a callable that says of a function whether it is this one and all conditions hold. "
     "A "
     "condition is (0, object, name, value) of an attribute, (1, dict, name, value) of an item, or (2, object, name, "
     "None) of an attribute that is an empty dict."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launches", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__launches() {
  struct {
    PyObject **name;
    const char *text;
  } names[] = {{&nameFields, "fields"},   {&nameSpec, "spec"},    {&nameReadonly, "readonly"},
               {&nameDevice, "device"},   {&nameIsNeg, "is_neg"}, {&nameAcquire, "acquire"},
               {&nameRelease, "release"}, {&nameWords, "_words"}, {&nameMemory, "_memory"}};
  for (auto &each : names)
    if (!(*each.name = PyUnicode_InternFromString(each.text)))
      return nullptr;
  PyObject *made = PyModule_Create(&module);
  PyObject *type = made ? PyType_FromSpec(&spec) : nullptr;
  if (type && !checkType)
    checkType = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&checkSpec));
  if (!type || !checkType || PyModule_AddIntConstant(made, "MEETINGS", 1) ||
      PyModule_AddObject(made, "Launches", type)) {
    Py_XDECREF(type);
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
}
