# A channel of CPU tensors between a worker and a server of this process: ch is the worker's side.
# The server answers what is sent, twice as large, in a thread.
import atexit
import threading

import torch

import fserver

scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False)
server = fserver.Server(scheduler=scheduler.scheduler, backend="CPU", connect=False)
worker = fserver.Worker(scheduler=scheduler.scheduler, backend="CPU", connect=False)
for _node in (scheduler, server, worker):
    atexit.register(_node.close)  # the worker first
_threads = [threading.Thread(target=n.connect, daemon=True) for n in (scheduler, server, worker)]
for _thread in _threads:
    _thread.start()
for _thread in _threads:
    _thread.join()
x, y, _z = torch.ones(4, 8), torch.empty(4, 8), torch.empty(4, 8)


def _serve() -> None:
    with server.channel([0], [_z], [0]) as theirs:
        try:
            while True:
                theirs.recv()
                _z.copy_(theirs.tensors[0][0] * 2)
                theirs.send()
        except fserver.Error:
            pass


threading.Thread(target=_serve, daemon=True).start()
ch = worker.channel([x], [0], [y], [0])
