"""torch.distributed.checkpoint loads a flipped bit as if it were trained.

$ python examples/comparisons/flipped_bit.py
"""

import glob
import tempfile

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import checkpoints


def flip(path):
    """One bit of the exponent of a weight of 1.0."""
    data = bytearray(open(path, "rb").read())
    at = data.find(torch.ones(4).numpy().tobytes())
    data[at + 3] ^= 0x40
    open(path, "wb").write(data)


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
    except checkpoints.Corrupt as error:
        print(f"ours: {error.message}; live tensor: {live['weight'].tolist()}")
