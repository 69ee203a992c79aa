irdl.dialect @shapes {
  irdl.type @box {
    %0 = irdl.is f32
    %1 = irdl.is f16
    %2 = irdl.any_of(%0, %1)
    irdl.parameters(element: %2)
  }
  irdl.operation @grow {
    %0 = irdl.base @shapes::@box
    %1 = irdl.is i32
    irdl.operands(box: %0, by: %1)
    irdl.results(out: %0)
  }
}
