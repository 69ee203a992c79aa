!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
module attributes {gpu.container_module} {
  gpu.module @kernels {
    gpu.func @double(%cache: !cache, %factor: bf16) kernel attributes {
        kv.args = [{name = "cache", kind = "cache"}, {name = "factor", kind = "scalar", dtype = "bf16"}],
        kv.max_threads = 128 : i32} {
      %bx = gpu.block_id x
      %b = arith.index_cast %bx : index to i32
      %tx = gpu.thread_id x
      %t = arith.index_cast %tx : index to i32
      %c0 = arith.constant 0 : i32
      %dead = arith.constant 7 : i32
      %x = "kv.load"(%cache, %b, %c0, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
      %f = vector.broadcast %factor : bf16 to vector<8xbf16>
      %y = arith.mulf %x, %f : vector<8xbf16>
      "kv.store"(%cache, %b, %c0, %t, %c0, %y) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<8xbf16>) -> ()
      gpu.return
    }
  }
}
