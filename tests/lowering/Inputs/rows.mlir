// The row of each of the first 64 tokens of a sequence (kernels.py).
!cache = !kv.cache<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!buffer2i = memref<?x?xi32, strided<[?, 1]>, 1>

module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @rows(%arg0: !cache, %arg1: !buffer2i) kernel attributes {kv.args = [{kind = "cache", name = "cache"}, {dtype = "i32", kind = "buffer", name = "found"}], kv.block = array<i32: 64, 1, 1>} {
      %block_id_x = gpu.block_id  x
      %0 = arith.index_cast %block_id_x : index to i32
      %thread_id_x = gpu.thread_id  x
      %1 = arith.index_cast %thread_id_x : index to i32
      %2 = "kv.cache_length"(%arg0, %0) : (!cache, i32) -> i32
      %3 = arith.cmpi slt, %1, %2 : i32
      scf.if %3 {
        %c0_i32 = arith.constant 0 : i32
        %4 = "kv.populate"(%arg0, %0, %c0_i32) {base_alignment = 0 : i64, is_leader = true, pair_cta = false, tile_rows = 64 : i64} : (!cache, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
        %5 = "kv.get_row"(%4, %1) : (!kv.rows<64 : i64, 16 : i64>, i32) -> i32
        %6 = arith.index_cast %0 : i32 to index
        %7 = arith.index_cast %1 : i32 to index
        memref.store %5, %arg1[%6, %7] : !buffer2i
      }
      gpu.return
    }
  }
}
