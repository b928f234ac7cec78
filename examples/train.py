# SPDX-License-Identifier: Apache-2.0
"""Train a small network on scikit-learn's digits, with few images per rank; a template to copy.

    python examples/train.py                                            # one process
    torchrun --nproc-per-node 4 examples/train.py                       # four ranks
    torchrun --nproc-per-node 4 examples/train.py --scope recommended

The numbers 1 to 4 mark the lines that normscope adds to a script with DistributedDataParallel.
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import normscope  # 1


def network() -> nn.Module:
    """Make a classifier from plain torch.nn layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        # After the pooling, a channel has one value per image: few images give noisy statistics.
        *(nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Load images [n, 1, 8, 8] and classes [n]: for training, and every fifth one held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    classes = torch.tensor(data.target)
    held_out = torch.arange(len(images)) % 5 == 0
    return (
        TensorDataset(images[~held_out], classes[~held_out]),
        TensorDataset(images[held_out], classes[held_out]),
    )


def train(args: argparse.Namespace, device: torch.device, rank: int, ranks: int) -> None:
    """Train on this rank's share of the images, evaluate and save."""
    torch.manual_seed(0)
    training, held_out = digits()
    sampler: DistributedSampler[object] = DistributedSampler(training, ranks, rank, drop_last=True)
    # All ranks have the same number of batches; if yours do not, see normscope.joined.
    loader = DataLoader(training, args.batch, sampler=sampler, drop_last=True)

    model = network().to(device)
    normscope.convert(model, scope="world")  # 2: keeps the parameters
    if args.scope != "recommended":
        normscope.set_scope(model, args.scope)
    parallel = model
    if dist.is_initialized():
        parallel = DistributedDataParallel(model)
        parallel.broadcast_buffers = False  # 3: each rank keeps its own running statistics

    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.02, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        parallel.train()
        if args.scope == "recommended" and epoch == 1:  # optional: one scope per layer, measured
            plan = normscope.recommend_scopes(model, [x.to(device) for x, _ in islice(loader, 16)])
            plan.apply(model)
            if rank == 0:
                print(plan)
        for images, classes in loader:
            optimizer.zero_grad()
            loss = cross_entropy(parallel(images.to(device)), classes.to(device))
            loss.backward()
            optimizer.step()
            rates.step()

    normscope.sync_running_stats(model)  # 4: on all ranks, before one of them evaluates or saves
    if rank == 0:
        model.eval()  # sends nothing: rank 0 can evaluate alone
        images, classes = (tensor.to(device) for tensor in held_out.tensors)
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == classes).float().mean().item()
        print(f"accuracy {accuracy:.3f} on {len(held_out)} held-out digits (ranks: {ranks})")
        torch.save(model.state_dict(), args.checkpoint)  # torch.nn's keys: loads without normscope


def main() -> None:
    """Read the command line, join the ranks that torchrun started, and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--scope", default="world", help="such as group:2, local or recommended")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="images per rank and step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        train(args, device, dist.get_rank(), dist.get_world_size())
        dist.barrier()  # no rank leaves while rank 0 evaluates
        # After train(): if DistributedDataParallel outlives its group, the exit can hang.
        dist.destroy_process_group()
    else:
        train(args, device, rank=0, ranks=1)


if __name__ == "__main__":
    main()
