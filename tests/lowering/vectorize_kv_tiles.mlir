// RUN: kv-opt %s --vectorize-kv-tiles | FileCheck %s
// RUN: %if alone %{ sed 's/, schedule = {.*}}/}/' %S/Inputs/attention.mlir | kv-opt - --kv-pipeline --target=host --stop-after=vectorize-kv-tiles --check-semantics-of=vectorize-kv-tiles --lengths=edges:16 --new=3 --model=%S/Inputs/models.py:attention -o /dev/null %}

#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
#column = affine_map<(m, n) -> (n)>
#one = affine_map<(m) -> (m)>

// What a row shares is loaded once for it; the rest of a row is a narrower vector. Tiles lie on the stack.
// CHECK-LABEL: func.func @elementwise
// CHECK-DAG:     %[[X:.*]] = memref.alloca() {alignment = 64 : i64} : memref<4x24xf32>
// CHECK-NOT:     memref.alloc()
// CHECK:         scf.for %[[I:.*]] =
// CHECK:           vector.load %{{.*}} vector<16xf32>
// CHECK-NEXT:      %[[S:.*]] = memref.load %{{.*}}[%[[I]]] : memref<4xf32>
// CHECK-NEXT:      vector.broadcast %[[S]]
// CHECK-NEXT:      arith.subf %{{.*}} : vector<16xf32>
// CHECK:           vector.store %{{.*}} vector<16xf32>
// CHECK:           vector.load %{{.*}} vector<8xf32>
// CHECK:           vector.store %{{.*}} vector<8xf32>
func.func @elementwise() attributes {kv.tiled, kv.host_kernel} {
  %x = memref.alloc() : memref<4x24xf32>
  %m = memref.alloc() : memref<4xf32>
  linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]} ins(%x, %m : memref<4x24xf32>, memref<4xf32>) outs(%x : memref<4x24xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %r = arith.subf %a, %b : f32
    linalg.yield %r : f32
  }
  return
}

// Positions of the last dimension are a vector, of the others a scalar; a bool has a byte.
// CHECK-LABEL: func.func @positions
// CHECK:         memref<4x16xi8>
// CHECK:         arith.constant dense<[0, 1, 2, {{.*}}15]> : vector<16xi32>
// CHECK:         arith.cmpi slt, {{.*}} : vector<16xi32>
// CHECK:         arith.extui {{.*}} : vector<16xi1> to vector<16xi8>
func.func @positions() attributes {kv.tiled, kv.host_kernel} {
  %x = memref.alloc() : memref<4x16xi1>
  linalg.generic {indexing_maps = [#id], iterator_types = ["parallel", "parallel"]} outs(%x : memref<4x16xi1>) {
  ^bb0(%o: i1):
    %i = linalg.index 0 : index
    %j = linalg.index 1 : index
    %a = arith.index_cast %i : index to i32
    %b = arith.index_cast %j : index to i32
    %r = arith.cmpi slt, %a, %b : i32
    linalg.yield %r : i1
  }
  return
}

// Along the rows a reduction has an accumulator of lanes; over the rows it adds whole vectors to the result.
// CHECK-LABEL: func.func @reductions
// CHECK:         scf.for {{.*}} iter_args(%{{.*}}) -> (vector<16xf32>)
// CHECK:           arith.maxnumf {{.*}} : vector<16xf32>
// CHECK:         vector.reduction <maxnumf>
// CHECK:         scf.for
// CHECK:           arith.addf {{.*}} : vector<16xf32>
// CHECK-NOT:     vector.reduction
// CHECK:         return
func.func @reductions(%x: memref<4x32xf32>, %m: memref<4xf32>, %s: memref<32xf32>) attributes {kv.tiled, kv.host_kernel} {
  linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} ins(%x : memref<4x32xf32>) outs(%m : memref<4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = arith.maxnumf %o, %a : f32
    linalg.yield %r : f32
  }
  linalg.generic {indexing_maps = [#id, #column], iterator_types = ["reduction", "parallel"]} ins(%x : memref<4x32xf32>) outs(%s : memref<32xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = arith.addf %o, %a : f32
    linalg.yield %r : f32
  }
  return
}

// Three rows by four vectors of columns stay in registers over the whole depth.
// CHECK-LABEL: func.func @product
// CHECK:         scf.for {{.*}} -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>)
// CHECK-COUNT-4:   vector.load
// CHECK-COUNT-12:  arith.mulf {{.*}} fastmath<contract> : vector<16xf32>
func.func @product(%a: memref<3x32xf32>, %b: memref<32x64xf32>, %c: memref<3x64xf32>) attributes {kv.tiled, kv.host_kernel} {
  linalg.matmul ins(%a, %b : memref<3x32xf32>, memref<32x64xf32>) outs(%c : memref<3x64xf32>)
  return
}

// The 16 sums of four rows and four columns end in one tree of 15 additions.
// CHECK-LABEL: func.func @product_of_rows
// CHECK-COUNT-16: arith.mulf {{.*}} : vector<16xf32>
// CHECK-COUNT-30: vector.shuffle
// CHECK-NOT:      vector.shuffle
// CHECK-COUNT-4:  vector.extract_strided_slice {{.*}} vector<4xf32>
func.func @product_of_rows(%a: memref<4x32xf32>, %b: memref<16x32xf32>, %c: memref<4x16xf32>) attributes {kv.tiled, kv.host_kernel} {
  linalg.matmul indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>] ins(%a, %b : memref<4x32xf32>, memref<16x32xf32>) outs(%c : memref<4x16xf32>)
  return
}

// exp2 is a polynomial: no call.
// CHECK-LABEL: func.func @power
// CHECK-NOT:     math.exp2
// CHECK:         math.floor {{.*}} : vector<16xf32>
func.func @power(%x: memref<16xf32>) attributes {kv.tiled, kv.host_kernel} {
  linalg.generic {indexing_maps = [#one, #one], iterator_types = ["parallel"]} ins(%x : memref<16xf32>) outs(%x : memref<16xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = math.exp2 %a : f32
    linalg.yield %r : f32
  }
  return
}
