// RUN: kv-opt %s --verify-diagnostics

// What the verifier refuses of tables of shared prefixes.

func.func @split_prefixes(%a: memref<?x?xi32>, %b: memref<?xi32>, %c: memref<?xi32>, %d: memref<?xi32>,
    %e: memref<?xi32>, %f: memref<?x?xi32>, %g: memref<?xi32>, %h: memref<?xi32>, %i: memref<?xi32>,
    %j: memref<?x?xi32>, %k: memref<?xi32>, %f2: memref<?xi32>, %j2: memref<?x?xi64>, %e2: memref<?xf32>) {
  // expected-error @below {{'kv.split_prefixes' op page_size must be positive, got 0 : i64}}
  "kv.split_prefixes"(%a, %b, %c, %d, %e, %f, %g, %h, %i, %j, %k) {page_size = 0 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.split_prefixes' op prefix_table must be a memref of rank 2, got memref<?xi32>}}
  "kv.split_prefixes"(%a, %b, %c, %d, %e, %f2, %g, %h, %i, %j, %k) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.split_prefixes' op suffix_table must have element type i32, got i64}}
  "kv.split_prefixes"(%a, %b, %c, %d, %e, %f, %g, %h, %i, %j2, %k) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi64>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.split_prefixes' op lengths must have element type i32, got f32}}
  "kv.split_prefixes"(%a, %b, %c, %d, %e2, %f, %g, %h, %i, %j, %k) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xf32>, memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}
