// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Whether objects that code reads by attributes and by names of modules are still the very ones that they were: what
// kvarn.dsl.captures asks before every launch of a kernel. For launches.cpp.
#ifndef KVARN_RUNTIME_CHECKS_H
#define KVARN_RUNTIME_CHECKS_H

#include "operands.h"

namespace {

// An attribute of an object, or an item of a dictionary, is this object; or the attribute is an empty dictionary.
enum class Look : int { Attribute, Item, Empty };

struct Condition {
  Look kind;
  PyObject *of, *name, *is;
};

struct Check {
  PyObject_HEAD;
  PyObject *function;
  Vector<Condition> conditions;
};

bool holds(const Condition &condition) {
  if (condition.kind == Look::Item)
    return PyDict_GetItemWithError(condition.of, condition.name) == condition.is;
  PyObject *found = PyObject_GetAttr(condition.of, condition.name);
  if (!found)
    return false;
  bool good = condition.kind == Look::Attribute ? found == condition.is : PyDict_Check(found) && !PyDict_Size(found);
  Py_DECREF(found);
  return good;
}

PyObject *checkCall(PyObject *object, PyObject *function) {
  Check *self = reinterpret_cast<Check *>(object);
  bool good = function == self->function;
  for (size_t i = 0; good && i < self->conditions.size(); i++)
    good = holds(self->conditions[i]);
  if (good)
    Py_RETURN_TRUE;
  PyErr_Clear(); // of what is gone
  Py_RETURN_FALSE;
}

PyMethodDef checkMethod = {"same", checkCall, METH_O, "same(function): whether it reads what it did."};

int checkTraverse(PyObject *object, visitproc visit, void *arg) {
  Check *self = reinterpret_cast<Check *>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->function);
  for (const Condition &each : self->conditions) {
    Py_VISIT(each.of);
    Py_VISIT(each.name);
    Py_VISIT(each.is);
  }
  return 0;
}

int checkClear(PyObject *object) {
  Check *self = reinterpret_cast<Check *>(object);
  Vector<Condition> gone;
  gone.swap(self->conditions);
  Py_CLEAR(self->function);
  for (const Condition &each : gone) {
    Py_DECREF(each.of);
    Py_DECREF(each.name);
    Py_XDECREF(each.is);
  }
  return 0;
}

void checkFree(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  checkClear(object);
  reinterpret_cast<Check *>(object)->conditions.~Vector<Condition>();
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyType_Slot checkSlots[] = {
    {Py_tp_traverse, reinterpret_cast<void *>(checkTraverse)},
    {Py_tp_clear, reinterpret_cast<void *>(checkClear)},
    {Py_tp_dealloc, reinterpret_cast<void *>(checkFree)},
    {0, nullptr},
};

PyType_Spec checkSpec = {"kvarn.runtime._launches.Check", sizeof(Check), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         checkSlots};

PyTypeObject *checkType; // made with the module

bool readCondition(PyObject *item, Vector<Condition> &out) {
  int kind;
  PyObject *of, *name, *is;
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "check takes conditions that are tuples");
    return false;
  }
  if (!PyArg_ParseTuple(item, "iOUO", &kind, &of, &name, &is))
    return false;
  if (kind < 0 || kind > 2 || (kind == 1 && !PyDict_CheckExact(of))) {
    PyErr_SetString(PyExc_ValueError, "check takes attributes, items of dictionaries, and empty attributes");
    return false;
  }
  out.push_back({static_cast<Look>(kind), of, name, is});
  return true;
}

PyObject *makeCheck(PyObject *, PyObject *args) {
  PyObject *function, *items;
  if (!PyArg_ParseTuple(args, "OO", &function, &items))
    return nullptr;
  if (!PyList_Check(items)) {
    PyErr_SetString(PyExc_TypeError, "check takes a function and a list of conditions");
    return nullptr;
  }
  Vector<Condition> conditions;
  for (Py_ssize_t i = 0; i < PyList_Size(items); i++)
    if (!readCondition(PyList_GetItem(items, i), conditions))
      return nullptr;
  allocfunc allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(checkType, Py_tp_alloc));
  Check *self = reinterpret_cast<Check *>(allocate(checkType, 0));
  if (!self)
    return nullptr;
  new (&self->conditions) Vector<Condition>(std::move(conditions));
  Py_INCREF(function);
  self->function = function;
  for (const Condition &each : self->conditions) {
    Py_INCREF(each.of);
    Py_INCREF(each.name);
    Py_INCREF(each.is);
  }
  PyObject *made = PyCFunction_NewEx(&checkMethod, reinterpret_cast<PyObject *>(self), nullptr);
  Py_DECREF(self);
  return made;
}

} // namespace

#endif
