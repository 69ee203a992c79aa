// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Effects and speculation for operations that Python declares.
//
// Operations of an IRDL dialect carry no interfaces, so upstream passes must assume the worst of
// them: none is dropped, merged or moved. MLIR 22.1 can attach interfaces from C++ only. This library
// attaches them from data, through a C ABI, so that one build serves every Python version.
//
// It is loaded with ctypes beside the bindings' own libMLIRPythonCAPI.so, by soname; nothing here may
// outlive or replace that library, and the loader checks that both are of one version.

#include "mlir/IR/ExtensibleDialect.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/IR/Operation.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

#include <cstdint>
#include <cstring>
#include <mutex>

#ifndef KVARN_MLIR_VERSION
#error "KVARN_MLIR_VERSION must name the release of the bindings that the headers belong to"
#endif

namespace kvarn {

constexpr int maxEffects = 8;

// The codes of __init__.py.
enum Kind : int { Read, Write, Allocate, Free };
enum Status : int {
  Ok = 0,
  UnknownOperation = 1,
  NotDynamic = 2,
  BadEffect = 3,
  TooManyEffects = 4,
  ForeignInterface = 5,
  EqualityNotPatched = 6,
};

// Contents of pages and scales; everything else is MLIR's default resource.
struct CacheResource : mlir::SideEffects::Resource::Base<CacheResource> {
  MLIR_DEFINE_EXPLICIT_INTERNAL_INLINE_TYPE_ID(CacheResource)
  mlir::StringRef getName() final { return "kv.cache"; }
};

struct EffectData {
  int kind;
  int operand; // -1: the whole resource
  int resource;
};

mlir::SideEffects::Resource *resourceOf(int id) {
  if (id == 0)
    return mlir::SideEffects::DefaultResource::get();
  return CacheResource::get();
}

mlir::MemoryEffects::Effect *effectOf(int kind) {
  switch (kind) {
  case Read:
    return mlir::MemoryEffects::Read::get();
  case Write:
    return mlir::MemoryEffects::Write::get();
  case Allocate:
    return mlir::MemoryEffects::Allocate::get();
  default:
    return mlir::MemoryEffects::Free::get();
  }
}

// The context frees a model without running its destructor, so the data lies inside it.
struct EffectsModel : mlir::MemoryEffectOpInterface::ExternalModel<EffectsModel, mlir::Operation> {
  int count = 0;
  EffectData data[maxEffects] = {};

  void getEffects(mlir::Operation *op, llvm::SmallVectorImpl<mlir::MemoryEffects::EffectInstance> &effects) const {
    for (int i = 0; i < count; ++i) {
      const EffectData &e = data[i];
      auto *effect = effectOf(e.kind);
      auto *resource = resourceOf(e.resource);
      if (e.operand >= 0 && static_cast<unsigned>(e.operand) < op->getNumOperands()) {
        effects.emplace_back(effect, &op->getOpOperand(e.operand), resource);
      } else if (e.kind == Allocate && op->getNumResults() > 0) {
        // Upstream drops an unused allocation only when the effect names what was allocated.
        for (mlir::OpResult result : op->getResults())
          effects.emplace_back(effect, result, resource);
      } else {
        effects.emplace_back(effect, resource);
      }
    }
  }
};

struct SpeculationModel : mlir::ConditionallySpeculatable::ExternalModel<SpeculationModel, mlir::Operation> {
  bool speculatable = false;

  mlir::Speculation::Speculatability getSpeculatability(mlir::Operation *) const {
    return speculatable ? mlir::Speculation::Speculatable : mlir::Speculation::NotSpeculatable;
  }
};

//===----------------------------------------------------------------------===//
// Equality
//
// Two operations are equivalent only if their properties compare equal, and
// DynamicOpDefinition::compareProperties (final) answers false although a dynamic operation has no
// properties: CSE would never merge two. Each definition that this library attaches effects to is
// therefore given a copy of its virtual table in which that one entry answers true. The entry's place
// comes from the compiler (the Itanium ABI's member pointer), not from counting; definitions of any
// other class, or whose comparison already works, are left as they are.
//===----------------------------------------------------------------------===//

bool compareNoProperties(void *, mlir::OpaqueProperties, mlir::OpaqueProperties) { return true; }

// OperationName keeps its implementation class to itself and those that derive from it.
struct Access : mlir::OperationName {
  using Concept = mlir::OperationName::InterfaceConcept;
  explicit Access(mlir::OperationName name) : mlir::OperationName(name) {}
  void *object() const { return getImpl(); }

  template <typename Member>
  static std::size_t slot(Member member) {
    struct {
      std::uintptr_t entry; // 1 + byte offset, for a virtual member
      std::ptrdiff_t adjust;
    } raw;
    static_assert(sizeof(raw) == sizeof(member), "member pointers are not those of the Itanium ABI");
    std::memcpy(&raw, &member, sizeof(raw));
    return (raw.entry - 1) / sizeof(void *);
  }
  static std::size_t compareSlot() { return slot(&Concept::compareProperties); }
  static std::size_t lastSlot() { return slot(&Concept::hashProperties); }
};

constexpr std::size_t maxSlots = 64;
constexpr std::size_t prefix = 2; // offset to top, type information

bool patchEquality(mlir::OperationName name) {
  static std::mutex mutex;
  static void *table[prefix + maxSlots]; // for the life of the process, as the virtual table it copies
  static void **original = nullptr;

  std::lock_guard<std::mutex> lock(mutex);
  if (name.getOpPropertyByteSize() != 0)
    return false;
  if (name.compareOpProperties(nullptr, nullptr))
    return true;
  std::size_t compare = Access::compareSlot(), last = Access::lastSlot();
  if (last >= maxSlots || compare >= last)
    return false;
  void ***object = static_cast<void ***>(Access(name).object());
  if (!original) {
    original = *object;
    std::memcpy(table, original - prefix, (prefix + last + 1) * sizeof(void *));
    table[prefix + compare] = reinterpret_cast<void *>(&compareNoProperties);
  }
  if (*object != original) // another class of definition
    return false;
  *object = table + prefix;
  return name.compareOpProperties(nullptr, nullptr);
}

// The attached model, or null when something else than this library attached the interface.
template <typename Model, typename Interface, typename Function>
Model *attached(mlir::RegisteredOperationName op, Function Interface::Concept::*function) {
  if (!op.hasInterface<Interface>())
    op.attachInterface<Model>();
  typename Interface::Concept *found = op.getInterface<Interface>();
  Model ours;
  typename Interface::Concept *expected = &ours;
  return found->*function == expected->*function ? static_cast<Model *>(found) : nullptr;
}

} // namespace kvarn

using namespace kvarn;

extern "C" {

// The release of the bindings that this library was built for.
__attribute__((visibility("default"))) const char *kvarn_native_version() { return KVARN_MLIR_VERSION; }

// Declares the effects of one dynamic operation in one context. `kinds`, `operands` and `resources` have
// `count` entries; a repeated call replaces the earlier declaration. Returns a Status.
__attribute__((visibility("default"))) int kvarn_attach_effects(void *context, const char *name, int count,
                                                                const int *kinds, const int *operands,
                                                                const int *resources, int speculatable) {
  if (count < 0 || count > maxEffects)
    return TooManyEffects;
  for (int i = 0; i < count; ++i)
    if (kinds[i] < Read || kinds[i] > Free || operands[i] < -1 || resources[i] < 0 || resources[i] > 1)
      return BadEffect;
  auto *mlirContext = static_cast<mlir::MLIRContext *>(context);
  auto op = mlir::RegisteredOperationName::lookup(name, mlirContext);
  if (!op)
    return UnknownOperation;
  if (!mlir::isa<mlir::DynamicDialect>(op->getDialect()))
    return NotDynamic;
  using Effects = mlir::MemoryEffectOpInterface;
  using Speculation = mlir::ConditionallySpeculatable;
  auto *effects = attached<EffectsModel, Effects>(*op, &Effects::Concept::getEffects);
  auto *speculation = attached<SpeculationModel, Speculation>(*op, &Speculation::Concept::getSpeculatability);
  if (!effects || !speculation)
    return ForeignInterface;
  effects->count = count;
  for (int i = 0; i < count; ++i)
    effects->data[i] = {kinds[i], operands[i], resources[i]};
  speculation->speculatable = speculatable != 0;
  return patchEquality(*op) ? Ok : EqualityNotPatched;
}

} // extern "C"
