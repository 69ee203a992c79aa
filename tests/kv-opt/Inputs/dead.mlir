func.func @f(%a: i32) -> i32 {
  %dead = arith.constant 7 : i64
  %0 = arith.addi %a, %a : i32
  %1 = arith.addi %a, %a : i32
  %2 = arith.muli %0, %1 : i32
  return %2 : i32
}
