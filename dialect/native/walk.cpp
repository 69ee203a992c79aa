// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The walk of kvarn.lowering.rewrite: the operations under one whose names match, as a list.
//
// The bindings' walk calls Python with every operation, which costs passes most of their time. This one calls Python
// once per name, and makes objects of the operations that match only. The stable ABI of Python 3.10 makes one build
// serve every later Python.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "mlir/IR/Operation.h"
#include "mlir/IR/Visitors.h"
#include "llvm/ADT/DenseMap.h"

namespace {

struct Walker {
  PyObject *create;     // ir.Operation._CAPICreate: a capsule to an operation
  PyObject *match;      // a name to whether its operations are wanted; None: all are
  const char *capsules; // the name of such capsules
  PyObject *found;
  llvm::DenseMap<const void *, bool> wanted; // by the address of an operation's name

  // Whether operations of this name are wanted; -1 with an exception set.
  int wants(mlir::OperationName name) {
    if (match == Py_None)
      return 1;
    auto known = wanted.find(name.getAsOpaquePointer());
    if (known != wanted.end())
      return known->second;
    mlir::StringRef text = name.getStringRef();
    PyObject *string = PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    PyObject *answer = string ? PyObject_CallFunctionObjArgs(match, string, nullptr) : nullptr;
    int is = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_XDECREF(string);
    if (is >= 0)
      wanted[name.getAsOpaquePointer()] = is != 0;
    return is;
  }

  bool add(mlir::Operation *op) {
    PyObject *capsule = PyCapsule_New(op, capsules, nullptr);
    PyObject *object = capsule ? PyObject_CallFunctionObjArgs(create, capsule, nullptr) : nullptr;
    bool added = object && PyList_Append(found, object) == 0;
    Py_XDECREF(object);
    Py_XDECREF(capsule);
    return added;
  }
};

} // namespace

// The operations under and with that of a capsule, in program order, outer before inner; null with an exception set.
extern "C" __attribute__((visibility("default"))) PyObject *kvarn_walk(PyObject *root, PyObject *create,
                                                                       PyObject *match) {
  const char *capsules = PyCapsule_GetName(root);
  auto *operation = capsules ? static_cast<mlir::Operation *>(PyCapsule_GetPointer(root, capsules)) : nullptr;
  PyObject *found = operation ? PyList_New(0) : nullptr;
  if (!found)
    return nullptr;
  Walker walker{create, match, capsules, found, llvm::DenseMap<const void *, bool>()};
  mlir::WalkResult result = operation->walk<mlir::WalkOrder::PreOrder>([&walker](mlir::Operation *op) {
    int is = walker.wants(op->getName());
    if (is < 0 || (is && !walker.add(op)))
      return mlir::WalkResult::interrupt();
    return mlir::WalkResult::advance();
  });
  if (!result.wasInterrupted())
    return found;
  Py_DECREF(found);
  return nullptr;
}
