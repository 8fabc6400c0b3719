"""An unmodified training script: plain torch, its own checkpoint, no import of this project.

It has no notion of worlds: it reads the environment set by torchrun, loads the newest checkpoint
and resumes. The ledger lines are for the tests only.

Float64, and gradients weighted by samples: any world size gives the same weights up to 1e-12.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from job_arguments import job_parser
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
    return x, (x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()


def note(event: str, **values: object) -> None:
    line = {"event": event, "generation": GENERATION, **values, "time": time.time()}
    path = Path(os.environ["ELASTIC_LEDGER"], f"{os.getpid()}-{RANK}.jsonl")
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def save(path: Path, state: dict[str, object]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(buffer.getvalue())
    temporary.replace(path)


def main() -> None:
    options = job_parser().parse_args()

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint = Path(os.environ["ELASTIC_CHECKPOINTS"], "plain.pt")
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    # All ranks have read the checkpoint before any rank writes the next one.
    dist.barrier()
    note("start", step=first, rank=RANK, size=SIZE, node=os.environ["ELASTIC_NODE_NAME"])

    x, y = data(options.samples)
    per_epoch = -(-options.samples // options.batch)
    for step in range(first, per_epoch * options.epochs):
        epoch, index = divmod(step, per_epoch)
        order = torch.randperm(options.samples, generator=torch.Generator().manual_seed(epoch))
        batch = order[index * options.batch : (index + 1) * options.batch]
        mine = batch[RANK::SIZE]
        loss = ((model(x[mine]) - y[mine]) ** 2).sum() * (SIZE / len(batch))
        optimizer.zero_grad()
        if (fails := options.folder / f"fails-{os.environ['ELASTIC_NODE_NAME']}").exists():
            raise RuntimeError(fails.read_text())
        loss.backward()
        optimizer.step()
        note("step", step=step, epoch=epoch, rank=RANK, samples=mine.tolist())
        if (step + 1) % options.save_every == 0:
            # A checkpoint may only hold steps that every rank has logged.
            dist.barrier()
            if RANK == 0:
                save(
                    checkpoint,
                    {
                        "model": module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    },
                )
        if not (options.folder / "hurry").exists():
            # As elastic.testing.pacing does it: slower in the second half.
            time.sleep(options.step_s if epoch < options.epochs / 2 else max(options.step_s, 1.0))

    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    if RANK == 0:
        save_file(module.state_dict(), options.folder / "final.safetensors")
    note("end", rank=RANK, sha256=hashlib.sha256(weights).hexdigest())
    # Otherwise torch 2.13 may hang here: docs/how-to/troubleshooting.md, "A worker does not end".
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Backends other than etcd-v3 at least count restarts.
    RESTARTS = {"generation": int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1}
    GENERATION = json.loads(os.environ.get("ELASTIC_WORLD", json.dumps(RESTARTS)))["generation"]
    main()
