# The names that an excerpt about fserver.ringx uses, for a group of one rank on the CPU.
import torch
import torch.distributed

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
rank, size, length, group = 0, 1, 16, None
tokens = torch.arange(length).reshape(1, length)
q, k, v = (torch.randn(1, length, 2, 8, requires_grad=True) for _ in range(3))
gradient = torch.ones(1, length, 2, 8)
