// What the attention weights of 16 rows of each sequence add up to for each token: a sum of columns (kernels.py).
!buffer3h = memref<?x?x?xbf16, strided<[?, ?, 1]>, 1>
!cache = !kv.cache<"paged", bf16, 1 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!buffer2 = memref<?x?xf32, strided<[?, 1]>, 1>

module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @observed(%arg0: !buffer3h, %arg1: !cache, %arg2: !buffer2) kernel attributes {kv.args = [{dtype = "bf16", kind = "buffer", name = "query"}, {kind = "cache", name = "keys"}, {dtype = "f32", kind = "buffer", name = "seen"}], kv.block = array<i32: 128, 1, 1>, kv.tiled} {
      %block_id_x = gpu.block_id  x
      %0 = arith.index_cast %block_id_x : index to i32
      %1 = "kv.tile_index"() : () -> tensor<16xi32>
      %2 = "kv.tile_index"() : () -> tensor<64xi32>
      %3 = "kv.cache_length"(%arg1, %0) : (!cache, i32) -> i32
      %splat = tensor.splat %0 : tensor<16xi32>
      %cst = arith.constant dense<true> : tensor<16xi1>
      %4 = "kv.tile_load_rows"(%arg0, %cst, %splat, %1) : (!buffer3h, tensor<16xi1>, tensor<16xi32>, tensor<16xi32>) -> tensor<16x64xbf16>
      %cst_0 = arith.constant dense<-3.000000e+38> : tensor<16xf32>
      %cst_1 = arith.constant dense<0.000000e+00> : tensor<16xf32>
      %c63_i32 = arith.constant 63 : i32
      %5 = arith.addi %3, %c63_i32 : i32
      %c64_i32 = arith.constant 64 : i32
      %c6_i32 = arith.constant 6 : i32
      %6 = arith.shrui %5, %c6_i32 : i32
      %c0_i32 = arith.constant 0 : i32
      %c1_i32 = arith.constant 1 : i32
      %7:2 = scf.for %arg3 = %c0_i32 to %6 step %c1_i32 iter_args(%arg4 = %cst_0, %arg5 = %cst_1) -> (tensor<16xf32>, tensor<16xf32>)  : i32 {
        %c64_i32_7 = arith.constant 64 : i32
        %10 = arith.muli %arg3, %c64_i32_7 : i32
        %c0_i32_8 = arith.constant 0 : i32
        %c0_i32_9 = arith.constant 0 : i32
        %11 = "kv.tile_load"(%arg1, %0, %c0_i32_8, %10, %c0_i32_9, %3) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16>
        %12 = "kv.dot"(%4, %11) {transpose_b = true} : (tensor<16x64xbf16>, tensor<64x64xbf16>) -> tensor<16x64xf32>
        %cst_10 = arith.constant dense<1.250000e-01> : tensor<16x64xf32>
        %13 = arith.mulf %12, %cst_10 fastmath<contract> : tensor<16x64xf32>
        %c64_i32_11 = arith.constant 64 : i32
        %14 = arith.muli %arg3, %c64_i32_11 : i32
        %splat_12 = tensor.splat %14 : tensor<64xi32>
        %15 = arith.addi %splat_12, %2 : tensor<64xi32>
        %splat_13 = tensor.splat %3 : tensor<64xi32>
        %16 = arith.cmpi slt, %15, %splat_13 : tensor<64xi32>
        %17 = "kv.tile_broadcast"(%16) {dimension = 1 : i64} : (tensor<64xi1>) -> tensor<16x64xi1>
        %18 = "kv.tile_mask"(%13, %17) : (tensor<16x64xf32>, tensor<16x64xi1>) -> tensor<16x64xf32>
        %19 = "kv.tile_reduce"(%18) {axis = 1 : i64, kind = "max"} : (tensor<16x64xf32>) -> tensor<16xf32>
        %20 = arith.maxnumf %arg4, %19 : tensor<16xf32>
        %21 = arith.subf %arg4, %20 fastmath<contract> : tensor<16xf32>
        %22 = math.exp %21 : tensor<16xf32>
        %23 = arith.mulf %arg5, %22 fastmath<contract> : tensor<16xf32>
        %24 = "kv.tile_broadcast"(%20) {dimension = 0 : i64} : (tensor<16xf32>) -> tensor<16x64xf32>
        %25 = arith.subf %18, %24 fastmath<contract> : tensor<16x64xf32>
        %26 = math.exp %25 : tensor<16x64xf32>
        %27 = "kv.tile_reduce"(%26) {axis = 1 : i64, kind = "add"} : (tensor<16x64xf32>) -> tensor<16xf32>
        %28 = arith.addf %23, %27 fastmath<contract> : tensor<16xf32>
        scf.yield %20, %28 : tensor<16xf32>, tensor<16xf32>
      }
      %c63_i32_2 = arith.constant 63 : i32
      %8 = arith.addi %3, %c63_i32_2 : i32
      %c64_i32_3 = arith.constant 64 : i32
      %c6_i32_4 = arith.constant 6 : i32
      %9 = arith.shrui %8, %c6_i32_4 : i32
      %c0_i32_5 = arith.constant 0 : i32
      %c1_i32_6 = arith.constant 1 : i32
      scf.for %arg3 = %c0_i32_5 to %9 step %c1_i32_6  : i32 {
        %c64_i32_7 = arith.constant 64 : i32
        %10 = arith.muli %arg3, %c64_i32_7 : i32
        %c0_i32_8 = arith.constant 0 : i32
        %c0_i32_9 = arith.constant 0 : i32
        %11 = "kv.tile_load"(%arg1, %0, %c0_i32_8, %10, %c0_i32_9, %3) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16>
        %12 = "kv.dot"(%4, %11) {transpose_b = true} : (tensor<16x64xbf16>, tensor<64x64xbf16>) -> tensor<16x64xf32>
        %cst_10 = arith.constant dense<1.250000e-01> : tensor<16x64xf32>
        %13 = arith.mulf %12, %cst_10 fastmath<contract> : tensor<16x64xf32>
        %14 = "kv.tile_broadcast"(%7#0) {dimension = 0 : i64} : (tensor<16xf32>) -> tensor<16x64xf32>
        %15 = arith.subf %13, %14 fastmath<contract> : tensor<16x64xf32>
        %16 = math.exp %15 : tensor<16x64xf32>
        %17 = "kv.tile_broadcast"(%7#1) {dimension = 0 : i64} : (tensor<16xf32>) -> tensor<16x64xf32>
        %18 = arith.divf %16, %17 : tensor<16x64xf32>
        %c64_i32_11 = arith.constant 64 : i32
        %19 = arith.muli %arg3, %c64_i32_11 : i32
        %splat_12 = tensor.splat %19 : tensor<64xi32>
        %20 = arith.addi %splat_12, %2 : tensor<64xi32>
        %21 = "kv.tile_reduce"(%18) {axis = 0 : i64, kind = "add"} : (tensor<16x64xf32>) -> tensor<64xf32>
        %c64_i32_13 = arith.constant 64 : i32
        %22 = arith.muli %arg3, %c64_i32_13 : i32
        %splat_14 = tensor.splat %22 : tensor<64xi32>
        %23 = arith.addi %splat_14, %2 : tensor<64xi32>
        %splat_15 = tensor.splat %3 : tensor<64xi32>
        %24 = arith.cmpi slt, %23, %splat_15 : tensor<64xi32>
        %splat_16 = tensor.splat %0 : tensor<64xi32>
        "kv.tile_scatter"(%21, %arg2, %24, %splat_16, %20) : (tensor<64xf32>, !buffer2, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
      }
      gpu.return
    }
  }
}
