# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A rank that is late is named by the others: torchrun --nproc-per-node 2 examples/parallel/late.py"""

import datetime
import time

import torch
import torch.distributed as dist

import kvarn as kv

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
parallel = kv.parallel.HeadParallel(2, timeout=2.0)
if dist.get_rank() == 1:
    time.sleep(4)  # late: rank 0 has given up by then
try:
    parallel.gather(torch.zeros(3, 1, 8))
except kv.parallel.RankError as error:
    print(error)
    if error.ranks != (1,):
        raise
else:
    raise AssertionError("a late rank went unnoticed")
