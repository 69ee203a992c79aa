// Attention of 64 query rows of each sequence, whose scores get a bias by the distance of query and key (kernels.py).
!buffer3h = memref<?x?x?xbf16, strided<[?, ?, 1]>, 1>
!cache = !kv.cache<"paged", bf16, 1 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!buffer1 = memref<?xf32, strided<[1]>, 1>

module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @biased(%arg0: !buffer3h, %arg1: !cache, %arg2: !cache, %arg3: !buffer1, %arg4: !buffer3h) kernel attributes {kv.args = [{dtype = "bf16", kind = "buffer", name = "query"}, {kind = "cache", name = "keys"}, {kind = "cache", name = "values"}, {dtype = "f32", kind = "buffer", name = "bias"}, {dtype = "bf16", kind = "buffer", name = "out"}], kv.block = array<i32: 128, 1, 1>, kv.tiled} {
      %block_id_x = gpu.block_id  x
      %0 = arith.index_cast %block_id_x : index to i32
      %1 = "kv.tile_index"() : () -> tensor<64xi32>
      %2 = "kv.cache_length"(%arg1, %0) : (!cache, i32) -> i32
      %splat = tensor.splat %0 : tensor<64xi32>
      %cst = arith.constant dense<true> : tensor<64xi1>
      %3 = "kv.tile_load_rows"(%arg0, %cst, %splat, %1) : (!buffer3h, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> tensor<64x64xbf16>
      %cst_0 = arith.constant dense<-3.000000e+38> : tensor<64xf32>
      %cst_1 = arith.constant dense<0.000000e+00> : tensor<64xf32>
      %cst_2 = arith.constant dense<0.000000e+00> : tensor<64x64xf32>
      %c63_i32 = arith.constant 63 : i32
      %4 = arith.addi %2, %c63_i32 : i32
      %c64_i32 = arith.constant 64 : i32
      %c6_i32 = arith.constant 6 : i32
      %5 = arith.shrui %4, %c6_i32 : i32
      %c0_i32 = arith.constant 0 : i32
      %c1_i32 = arith.constant 1 : i32
      %6:3 = scf.for %arg5 = %c0_i32 to %5 step %c1_i32 iter_args(%arg6 = %cst_0, %arg7 = %cst_1, %arg8 = %cst_2) -> (tensor<64xf32>, tensor<64xf32>, tensor<64x64xf32>)  : i32 {
        %c64_i32_6 = arith.constant 64 : i32
        %11 = arith.muli %arg5, %c64_i32_6 : i32
        %c0_i32_7 = arith.constant 0 : i32
        %c0_i32_8 = arith.constant 0 : i32
        %12 = "kv.tile_load"(%arg1, %0, %c0_i32_7, %11, %c0_i32_8, %2) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16>
        %c64_i32_9 = arith.constant 64 : i32
        %13 = arith.muli %arg5, %c64_i32_9 : i32
        %c0_i32_10 = arith.constant 0 : i32
        %c0_i32_11 = arith.constant 0 : i32
        %14 = "kv.tile_load"(%arg2, %0, %c0_i32_10, %13, %c0_i32_11, %2) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16>
        %c64_i32_12 = arith.constant 64 : i32
        %15 = arith.muli %arg5, %c64_i32_12 : i32
        %16 = "kv.tile_index"() : () -> tensor<64xi32>
        %splat_13 = tensor.splat %15 : tensor<64xi32>
        %17 = arith.addi %splat_13, %16 : tensor<64xi32>
        %c64_i32_14 = arith.constant 64 : i32
        %18 = arith.subi %2, %c64_i32_14 : i32
        %splat_15 = tensor.splat %18 : tensor<64xi32>
        %19 = arith.addi %splat_15, %1 : tensor<64xi32>
        %20 = "kv.tile_broadcast"(%19) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x64xi32>
        %21 = "kv.tile_broadcast"(%17) {dimension = 1 : i64} : (tensor<64xi32>) -> tensor<64x64xi32>
        %22 = arith.subi %20, %21 : tensor<64x64xi32>
        %cst_16 = arith.constant dense<31> : tensor<64x64xi32>
        %23 = arith.minsi %22, %cst_16 : tensor<64x64xi32>
        %cst_17 = arith.constant dense<0> : tensor<64x64xi32>
        %24 = arith.maxsi %23, %cst_17 : tensor<64x64xi32>
        %cst_18 = arith.constant dense<true> : tensor<64x64xi1>
        %25 = "kv.tile_gather"(%arg3, %cst_18, %24) : (!buffer1, tensor<64x64xi1>, tensor<64x64xi32>) -> tensor<64x64xf32>
        %26 = "kv.dot"(%3, %12) {transpose_b = true} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
        %cst_19 = arith.constant dense<1.250000e-01> : tensor<64x64xf32>
        %27 = arith.mulf %26, %cst_19 fastmath<contract> : tensor<64x64xf32>
        %28 = arith.addf %27, %25 fastmath<contract> : tensor<64x64xf32>
        %splat_20 = tensor.splat %2 : tensor<64xi32>
        %29 = arith.cmpi slt, %17, %splat_20 : tensor<64xi32>
        %30 = "kv.tile_broadcast"(%29) {dimension = 1 : i64} : (tensor<64xi1>) -> tensor<64x64xi1>
        %31 = "kv.tile_mask"(%28, %30) : (tensor<64x64xf32>, tensor<64x64xi1>) -> tensor<64x64xf32>
        %32 = "kv.tile_reduce"(%31) {axis = 1 : i64, kind = "max"} : (tensor<64x64xf32>) -> tensor<64xf32>
        %33 = arith.maxnumf %arg6, %32 : tensor<64xf32>
        %34 = arith.subf %arg6, %33 fastmath<contract> : tensor<64xf32>
        %35 = math.exp %34 : tensor<64xf32>
        %36 = "kv.tile_broadcast"(%33) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
        %37 = arith.subf %31, %36 fastmath<contract> : tensor<64x64xf32>
        %38 = math.exp %37 : tensor<64x64xf32>
        %39 = arith.mulf %arg7, %35 fastmath<contract> : tensor<64xf32>
        %40 = "kv.tile_reduce"(%38) {axis = 1 : i64, kind = "add"} : (tensor<64x64xf32>) -> tensor<64xf32>
        %41 = arith.addf %39, %40 fastmath<contract> : tensor<64xf32>
        %42 = arith.truncf %38 : tensor<64x64xf32> to tensor<64x64xbf16>
        %43 = "kv.tile_broadcast"(%35) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
        %44 = arith.mulf %arg8, %43 fastmath<contract> : tensor<64x64xf32>
        %45 = "kv.dot"(%42, %14, %44) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>, tensor<64x64xf32>) -> tensor<64x64xf32>
        scf.yield %33, %41, %45 : tensor<64xf32>, tensor<64xf32>, tensor<64x64xf32>
      }
      %cst_3 = arith.constant dense<1.000000e-30> : tensor<64xf32>
      %7 = arith.maxnumf %6#1, %cst_3 : tensor<64xf32>
      %8 = "kv.tile_broadcast"(%7) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
      %9 = arith.divf %6#2, %8 : tensor<64x64xf32>
      %10 = arith.truncf %9 : tensor<64x64xf32> to tensor<64x64xbf16>
      %splat_4 = tensor.splat %0 : tensor<64xi32>
      %cst_5 = arith.constant dense<true> : tensor<64xi1>
      "kv.tile_store_rows"(%10, %arg4, %cst_5, %splat_4, %1) : (tensor<64x64xbf16>, !buffer3h, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
      gpu.return
    }
  }
}
