# A scheduler, a worker and a server in this process. The server runs in a thread and answers each
# request with what was pushed, twice as large, as often as something is pulled.
import atexit
import threading

import torch  # noqa: F401

import fserver

scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False)
server = fserver.Server(scheduler=scheduler.scheduler, connect=False)
worker = fserver.Worker(scheduler=scheduler.scheduler, connect=False)
for _node in (scheduler, server, worker):
    atexit.register(_node.close)  # the worker first
_threads = [threading.Thread(target=n.connect, daemon=True) for n in (scheduler, server, worker)]
for _thread in _threads:
    _thread.start()
for _thread in _threads:
    _thread.join()


def _serve() -> None:
    try:
        while True:
            for _handler, _tensors, _keys in server.get_batch():
                server.respond([_x * 2 for _x in _tensors], _handler)
    except (fserver.ClosedError, fserver.PeerLostError):
        pass


threading.Thread(target=_serve, daemon=True).start()
