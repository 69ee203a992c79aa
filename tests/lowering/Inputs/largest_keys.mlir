// The largest key of a sequence's first head, column by column, of tiles that the tensor memory accelerator copies (kernels.py).
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
!cache = !kv.cache<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!buffer2 = memref<?x?xf32, strided<[?, 1]>, 1>

module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @largest_keys(%arg0: !cache, %arg1: !map, %arg2: !buffer2) kernel attributes {kv.args = [{kind = "cache", name = "cache"}, {kind = "tensormap", name = "keys"}, {dtype = "f32", kind = "buffer", name = "out"}], kv.block = array<i32: 64, 1, 1>} {
      %block_id_x = gpu.block_id  x
      %0 = arith.index_cast %block_id_x : index to i32
      %1 = "kv.alloc_shared"() {alignment = 1024 : i64, bytes = 4096 : i64} : () -> !llvm.ptr<3>
      %2 = "kv.alloc_shared"() {alignment = 16 : i64, bytes = 8 : i64} : () -> !llvm.ptr<3>
      %thread_id_x = gpu.thread_id  x
      %3 = arith.index_cast %thread_id_x : index to i32
      %c0_i32 = arith.constant 0 : i32
      %4 = arith.cmpi eq, %3, %c0_i32 : i32
      scf.if %4 {
        "kv.tma_init_barrier"(%2) {arrivals = 1 : i64} : (!llvm.ptr<3>) -> ()
      }
      gpu.barrier
      %cst = arith.constant -3.000000e+38 : f32
      %5 = "kv.cache_length"(%arg0, %0) : (!cache, i32) -> i32
      %c31_i32 = arith.constant 31 : i32
      %6 = arith.addi %5, %c31_i32 : i32
      %c32_i32 = arith.constant 32 : i32
      %c5_i32 = arith.constant 5 : i32
      %7 = arith.shrui %6, %c5_i32 : i32
      %c0_i32_0 = arith.constant 0 : i32
      %c1_i32 = arith.constant 1 : i32
      %8 = scf.for %arg3 = %c0_i32_0 to %7 step %c1_i32 iter_args(%arg4 = %cst) -> (f32)  : i32 {
        %c32_i32_2 = arith.constant 32 : i32
        %12 = arith.muli %arg3, %c32_i32_2 : i32
        %thread_id_x_3 = gpu.thread_id  x
        %13 = arith.index_cast %thread_id_x_3 : index to i32
        %c0_i32_4 = arith.constant 0 : i32
        %14 = arith.cmpi eq, %13, %c0_i32_4 : i32
        scf.if %14 {
          %c2_i32 = arith.constant 2 : i32
          "kv.tma_expect"(%arg1, %2, %c2_i32) {arrive = true} : (!map, !llvm.ptr<3>, i32) -> ()
          %17 = arith.subi %5, %12 : i32
          %c0_i32_9 = arith.constant 0 : i32
          %c0_i32_10 = arith.constant 0 : i32
          "kv.tma_load_tile"(%arg1, %arg0, %0, %c0_i32_9, %12, %17, %c0_i32_10, %1, %2) {beyond = "zero", cta_group = 1 : i64, multicast = 0 : i64, smem_rows = 32 : i64, tile_rows = 32 : i64} : (!map, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
        }
        %c1_i32_5 = arith.constant 1 : i32
        %15 = arith.andi %arg3, %c1_i32_5 : i32
        "kv.tma_wait"(%2, %15) : (!llvm.ptr<3>, i32) -> ()
        %c0_i32_6 = arith.constant 0 : i32
        %c32_i32_7 = arith.constant 32 : i32
        %c1_i32_8 = arith.constant 1 : i32
        %16 = scf.for %arg5 = %c0_i32_6 to %c32_i32_7 step %c1_i32_8 iter_args(%arg6 = %arg4) -> (f32)  : i32 {
          %17 = arith.addi %12, %arg5 : i32
          %18 = arith.cmpi slt, %17, %5 : i32
          %19 = scf.if %18 -> (f32) {
            %thread_id_x_9 = gpu.thread_id  x
            %20 = arith.index_cast %thread_id_x_9 : index to i32
            %c3_i32 = arith.constant 3 : i32
            %21 = arith.shrui %20, %c3_i32 : i32
            %c128_i32 = arith.constant 128 : i32
            %22 = arith.muli %arg5, %c128_i32 : i32
            %c7_i32 = arith.constant 7 : i32
            %23 = arith.andi %arg5, %c7_i32 : i32
            %24 = arith.xori %21, %23 : i32
            %c4_i32 = arith.constant 4 : i32
            %25 = arith.shli %24, %c4_i32 : i32
            %26 = arith.addi %22, %25 : i32
            %c7_i32_10 = arith.constant 7 : i32
            %27 = arith.andi %20, %c7_i32_10 : i32
            %c2_i32 = arith.constant 2 : i32
            %28 = arith.muli %27, %c2_i32 : i32
            %29 = arith.addi %26, %28 : i32
            %30 = llvm.getelementptr %1[%29] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
            %31 = llvm.load %30 {alignment = 2 : i64} : !llvm.ptr<3> -> bf16
            %32 = arith.extf %31 : bf16 to f32
            %33 = arith.maxnumf %arg6, %32 : f32
            scf.yield %33 : f32
          } else {
            scf.yield %arg6 : f32
          }
          scf.yield %19 : f32
        }
        gpu.barrier
        scf.yield %16 : f32
      }
      %thread_id_x_1 = gpu.thread_id  x
      %9 = arith.index_cast %thread_id_x_1 : index to i32
      %10 = arith.index_cast %0 : i32 to index
      %11 = arith.index_cast %9 : i32 to index
      memref.store %8, %arg2[%10, %11] : !buffer2
      gpu.return
    }
  }
}
