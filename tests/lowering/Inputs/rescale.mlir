// Multiplies the cached values of a head by its factor, and sums up what they are then (kernels.py).
!pool = !kv.collection<"paged", f8E4M3FN, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!buffer1 = memref<?xf32, strided<[1]>, 1>
!buffer2 = memref<?x?xf32, strided<[?, 1]>, 1>
!cache = !kv.cache<"paged", f8E4M3FN, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>

module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @rescale(%arg0: !pool, %arg1: i32, %arg2: !buffer1, %arg3: !buffer2) kernel attributes {kv.args = [{kind = "collection", name = "pool"}, {dtype = "i32", kind = "scalar", name = "layer"}, {dtype = "f32", kind = "buffer", name = "factors"}, {dtype = "f32", kind = "buffer", name = "sums"}], kv.block = array<i32: 8, 1, 1>} {
      %0 = "kv.value_cache"(%arg0, %arg1) : (!pool, i32) -> !cache
      %block_id_x = gpu.block_id  x
      %1 = arith.index_cast %block_id_x : index to i32
      %block_id_y = gpu.block_id  y
      %2 = arith.index_cast %block_id_y : index to i32
      %thread_id_x = gpu.thread_id  x
      %3 = arith.index_cast %thread_id_x : index to i32
      %c8_i32 = arith.constant 8 : i32
      %4 = arith.muli %3, %c8_i32 : i32
      %cst = arith.constant 0.000000e+00 : f32
      %5 = "kv.cache_length"(%0, %1) : (!cache, i32) -> i32
      %c0_i32 = arith.constant 0 : i32
      %c1_i32 = arith.constant 1 : i32
      %6 = scf.for %arg4 = %c0_i32 to %5 step %c1_i32 iter_args(%arg5 = %cst) -> (f32)  : i32 {
        %12 = "kv.load"(%0, %1, %2, %arg4, %4) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xf32>
        %13 = arith.index_cast %2 : i32 to index
        %14 = memref.load %arg2[%13] : !buffer1
        %15 = vector.broadcast %14 : f32 to vector<8xf32>
        %16 = arith.mulf %12, %15 fastmath<contract> : vector<8xf32>
        %17 = "kv.cast"(%16) : (vector<8xf32>) -> vector<8xf8E4M3FN>
        "kv.store"(%0, %1, %2, %arg4, %4, %17) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<8xf8E4M3FN>) -> ()
        %18 = vector.extract %16[0] : f32 from vector<8xf32>
        %19 = vector.extract %16[1] : f32 from vector<8xf32>
        %20 = vector.extract %16[2] : f32 from vector<8xf32>
        %21 = vector.extract %16[3] : f32 from vector<8xf32>
        %22 = vector.extract %16[4] : f32 from vector<8xf32>
        %23 = vector.extract %16[5] : f32 from vector<8xf32>
        %24 = vector.extract %16[6] : f32 from vector<8xf32>
        %25 = vector.extract %16[7] : f32 from vector<8xf32>
        %26 = arith.addf %18, %19 fastmath<contract> : f32
        %27 = arith.addf %20, %21 fastmath<contract> : f32
        %28 = arith.addf %22, %23 fastmath<contract> : f32
        %29 = arith.addf %24, %25 fastmath<contract> : f32
        %30 = arith.addf %26, %27 fastmath<contract> : f32
        %31 = arith.addf %28, %29 fastmath<contract> : f32
        %32 = arith.addf %30, %31 fastmath<contract> : f32
        %33 = arith.addf %arg5, %32 fastmath<contract> : f32
        scf.yield %33 : f32
      }
      %c8_i32_0 = arith.constant 8 : i32
      %7 = arith.muli %2, %c8_i32_0 : i32
      %thread_id_x_1 = gpu.thread_id  x
      %8 = arith.index_cast %thread_id_x_1 : index to i32
      %9 = arith.addi %7, %8 : i32
      %10 = arith.index_cast %1 : i32 to index
      %11 = arith.index_cast %9 : i32 to index
      memref.store %6, %arg3[%10, %11] : !buffer2
      gpu.return
    }
  }
}
