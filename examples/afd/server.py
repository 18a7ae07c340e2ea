"""The FFN server. It computes the MLPs for the rows of all workers together."""

import json

import torch
from model import FFN, load, weight_bytes
from protocol import VOTE, layer_of, options

import fserver


def serve(server: fserver.Server, ffn: FFN) -> list[int]:
    """Answers batches until all workers have left. Returns the number of rows of each batch."""
    sizes = []
    while True:
        try:
            batch = server.get_batch()  # one request of each worker
        except fserver.ClosedError:
            return sizes
        handlers = [handler for handler, _, _ in batch]
        pushed = [tensors[0] for _, tensors, _ in batch]
        key = batch[0][2][0]  # equal in all requests: the workers make the same calls
        if key == VOTE:
            total = torch.stack(pushed).sum(0)
            for handler in handlers:
                server.respond([total], handler)
        else:
            rows = torch.cat(pushed)
            sizes.append(len(rows))
            server.respond_vec(ffn(layer_of(key, len(ffn.mlps)), rows), pushed, handlers)


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    _, model = load(args.model)
    with fserver.Server(backend="CPU") as server, torch.inference_mode():
        ffn = FFN(model, server.rank, server.servers)
        del model
        sizes = serve(server, ffn)
    if args.out:
        result = {"weights": weight_bytes(ffn), "rows": sizes}
        (args.out / f"server-{server.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
