"""Train a GPT in plain PyTorch with Fabric on any engine.

Only the name of the strategy changes between one GPU and ZeRO-3, with and without tiling: ``auto``, ``ddp``, ``tiled``,
``tiled_ddp``, ``tiled_fsdp``, ``tiled_fsdp2``, ``tiled_deepspeed_stage_3``. Tokens are the bytes of a text file.

    python examples/gpt_fabric.py --text book.txt --strategy tiled_fsdp2 --devices 8 --seq-len 65536 --depth 24
    python examples/gpt_fabric.py --strategy tiled_ddp --devices 2 --accelerator cpu
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from lt_tiled import tiled_linear_cross_entropy  # the import also registers the names of the strategies
from lt_tiled.memory import PeakMemory
from lt_tiled.report import Report


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """The module that is tiled: it is position-wise."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """A layer under activation checkpointing, and an FSDP unit."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.norm2, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A language model of bytes. It returns its loss on ``ids`` of shape ``[B, S]``."""

    def __init__(self, hidden: int, depth: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, hidden), nn.Embedding(seq_len, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        # In forward, because engines that shard weights all-gather the head here.
        return tiled_linear_cross_entropy(self.norm(x), self.head.weight, ids, shift=True)


def main() -> None:
    """Train, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="by default a source file of Python")
    parser.add_argument(
        "--output", type=Path, default=Path("gpt.ckpt"), help="a file, or a directory if the engine shards"
    )
    parser.add_argument("--strategy", default="tiled")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed or bf16-true")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()

    fabric = L.Fabric(
        strategy=args.strategy, accelerator=args.accelerator, devices=args.devices, precision=args.precision
    )
    fabric.launch()
    fabric.seed_everything(1)
    gpt = GPT(args.hidden_size, args.depth, args.heads, args.seq_len)
    model, optimizer = fabric.setup(gpt, torch.optim.AdamW(gpt.parameters(), lr=args.learning_rate))

    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(fabric.global_rank)  # each rank draws other text
    memory = PeakMemory(fabric.device)
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.seq_len, (args.batch_size,), generator=draw)
        ids = torch.stack([text[start : start + args.seq_len] for start in starts.tolist()]).long()
        memory.reset()
        loss = model(fabric.to_device(ids))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()):.5f}")

    if fabric.is_global_zero:
        Console().print(Report.of(gpt).table(memory.describe(memory.read())))
    fabric.save(args.output, {"model": model})
    fabric.print(f"the weights are in {args.output}")


if __name__ == "__main__":
    main()
