"""torch.distributed.checkpoint loads a flipped bit without an error.

Disks, memory and networks flip bits; one in an exponent ends a training run, or silently ruins it.

    $ python examples/comparisons/flipped_bit.py
    DCP: loaded [inf, 1.0, 1.0, 1.0]
    ours: damaged checkpoint: step-000000001.g0.aa/00000-of-00001.safetensors, tensor 'weight':
    bytes 128 to 144 do not match their checksum; live tensor: [0.0, 0.0, 0.0, 0.0]
"""

import glob
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import checkpoints


def flip(path):
    """One bit of the exponent of a weight of 1.0."""
    data = bytearray(Path(path).read_bytes())
    at = data.find(torch.ones(4).numpy().tobytes())
    data[at + 3] ^= 0x40
    Path(path).write_bytes(data)


state = {"weight": torch.ones(4)}
with tempfile.TemporaryDirectory() as folder:
    save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    flip(glob.glob(f"{folder}/dcp/*.distcp")[0])
    live = {"weight": torch.zeros(4)}
    load(live, checkpoint_id=f"{folder}/dcp", no_dist=True)
    print(f"DCP: loaded {live['weight'].tolist()}")

    name = checkpoints.save(f"{folder}/ours", state, step=1, nonce="aa").name
    flip(glob.glob(f"{folder}/ours/{name}/*.safetensors")[0])
    live = {"weight": torch.zeros(4)}
    try:
        checkpoints.load(f"{folder}/ours", name, into=live)
    except checkpoints.CorruptCheckpoint as error:
        print(f"ours: {error.message}; live tensor: {live['weight'].tolist()}")
