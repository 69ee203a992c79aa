// RUN: kv-opt %s --record-kv-abi=target=sm_90a --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=record-kv-abi --check-semantics-of=record-kv-abi --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

// The record holds arguments and parameters; the attributes that it is made from go, launch bounds become NVVM's.
// CHECK: kv.abi = "{\22kernels\22: [{\22name\22: \22exact\22
// CHECK-SAME: \22args\22: [{\22name\22: \22x\22, \22kind\22: \22buffer\22, \22dtype\22: \22u32\22, \22rank\22: 1, \22alignment\22: 16, \22written\22: true}
// CHECK-SAME: {\22name\22: \22arg1\22, \22kind\22: \22scalar\22, \22dtype\22: \22f32\22}]
// CHECK-SAME: \22params\22: [{\22arg\22: 0, \22field\22: \22data\22}, {\22arg\22: 1, \22field\22: \22value\22}]
// CHECK-SAME: \22block\22: [128, 1, 1], \22max_threads\22: 0, \22shared_bytes\22: 64, \22cluster\22: null
// CHECK-SAME: \22program\22: null
// CHECK: gpu.func @exact
// CHECK-NOT: kv.
// CHECK-SAME: nvvm.maxnreg = 40 : i32
// CHECK-SAME: nvvm.minctasm = 2 : i32
// CHECK-SAME: nvvm.reqntid = array<i32: 128, 1, 1>
module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @exact(%p: !llvm.ptr<1>, %a: f32) kernel attributes {
        kv.args = [{name = "x", kind = "buffer", dtype = "u32"}], kv.arg_types = [memref<?xi32>, f32],
        kv.arg_alignments = array<i64: 16, 0>, kv.written = array<i64: 0>, kv.block = array<i32: 128, 1, 1>,
        kv.min_blocks = 2 : i32, kv.max_registers = 40 : i32, kv.shared_bytes = 64 : i64,
        kv.params = [{arg = 0, field = "data", type = "ptr"}, {arg = 1, field = "value", type = "f32"}]} {
      gpu.return
    }
  }
}

// -----

// CHECK: \22max_threads\22: 256
// CHECK: gpu.func @at_most
// CHECK-SAME: nvvm.maxntid = array<i32: 256>
module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @at_most() kernel attributes {kv.arg_types = [], kv.params = [], kv.max_threads = 256 : i32} {
      gpu.return
    }
  }
}

// -----

// A program's steps stand beside its kernels, and its arguments are described in the same way.
// CHECK: module attributes
// CHECK-NOT: kv.program
// CHECK-SAME: \22program\22: {\22name\22: \22fill\22, \22steps\22: []
// CHECK-SAME: \22args\22: [{\22name\22: \22n\22, \22kind\22: \22scalar\22, \22dtype\22: \22i32\22}]
module attributes {gpu.container_module, kv.program_args = [{name = "n", kind = "scalar", dtype = "i32"}],
                   kv.program = "{\"name\": \"fill\", \"arg_types\": [\"i32\"], \"steps\": [], \"workspaces\": []}"} {
  gpu.module @kernels {
    gpu.func @fill() kernel attributes {kv.arg_types = [], kv.params = []} {
      gpu.return
    }
  }
}

// -----

// A record stays what it was: the pipeline may be entered after this pass.
// CHECK: module attributes {gpu.container_module, kv.abi = "{\22kernels\22: [{\22name\22: \22done\22, \22args\22: []}], \22program\22: null}"}
module attributes {gpu.container_module, kv.abi = "{\"kernels\": [{\"name\": \"done\", \"args\": []}], \"program\": null}"} {
  gpu.module @kernels {
    gpu.func @done(%a: i32) kernel {
      gpu.return
    }
  }
}

// -----

// Nothing is recorded of a module without kernels.
// CHECK: module {
// CHECK-NEXT: func.func private @host
module {
  func.func private @host()
}

// -----

module attributes {gpu.container_module} {
  gpu.module @kernels {
    // expected-error @below {{'gpu.func' op must have arguments that can be passed to it: }}
    gpu.func @by_hand(%a: i32) kernel {
      gpu.return
    }
  }
}

// -----

module attributes {gpu.container_module} {
  gpu.module @kernels {
    // expected-error @below {{'gpu.func' op must use at most 232448 bytes of shared memory on sm_90a, got 400000}}
    gpu.func @too_much() kernel attributes {kv.arg_types = [], kv.params = [], kv.shared_bytes = 400000 : i64} {
      gpu.return
    }
  }
}
