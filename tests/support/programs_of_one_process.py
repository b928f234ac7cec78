# SPDX-License-Identifier: Apache-2.0
"""The reference of training programs.

It joins the norm batches of all ranks in one process, in float64 and with operations of torch
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from training_programs import (
    CHANNELS,
    MODELS,
    RESIDUALS,
    Program,
    Tensors,
    parameters_of,
    squared_gradients,
)


@dataclass
class Layer:
    """A layer of all ranks, in float64."""

    program: Program
    scope: str
    parameters: list[Tensors]  # of each rank
    running: list[list[torch.Tensor]]  # mean, variance and number of updates of each rank
    seen: list[list[torch.Tensor]] = field(default_factory=list)  # rows [n, C] of each rank
    elements: list[int] = field(default_factory=list)  # of each rank, in running statistics

    def norm_batches(self, xs: list[torch.Tensor]) -> list[list[tuple[int, slice]]]:
        """Return the samples of each norm batch, as slices of ranks."""
        kind, _, count = self.scope.partition(":")
        ranks = range(len(xs))
        whole = [(rank, slice(None)) for rank in ranks]
        if kind == "world":
            return [whole]
        if kind == "group":
            return [whole[i : i + int(count)] for i in range(0, len(xs), int(count))]
        if kind == "local":
            return [[one] for one in whole]
        batches = []
        for rank in ranks:
            first = 0
            for chunk in torch.arange(len(xs[rank])).chunk(int(count)):
                batches.append([(rank, slice(first, first + len(chunk)))])
                first += len(chunk)
        return batches

    def forward(self, xs: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Normalize the inputs of all ranks, and keep what updates the running statistics."""
        shape = (-1, *[1] * len(self.program.extent))
        affine = [[values.view(shape) for values in own.values()] for own in self.parameters]
        # Zeros, with gradients of zero if a norm batch is empty.
        ys = [0 * (x + weight + bias) for x, (weight, bias) in zip(xs, affine, strict=True)]
        seen: list[list[torch.Tensor]] = [[] for _ in xs]
        counts = [0 for _ in xs]
        for batch in self.norm_batches(xs):
            values = [xs[r][part].movedim(1, -1)[masks[r][part][:, 0]] for r, part in batch]
            joined = torch.cat(values)
            if len(joined) == 0:
                continue
            var, mean = torch.var_mean(joined, 0, correction=0)
            inv_std = (var + self.program.eps).rsqrt()
            for (r, part), own in zip(batch, values, strict=True):
                weight, bias = affine[r]
                y = (xs[r][part] - mean.view(shape)) * inv_std.view(shape) * weight + bias
                ys[r] = ys[r].clone()
                ys[r][part] = torch.where(masks[r][part], y, 0.0)
                if self.program.slice_stats != "first" or not part.start:
                    seen[r].append(joined.detach())
                    counts[r] += own.numel()
        before = self.seen or [[] for _ in xs]
        self.seen = [old + new for old, new in zip(before, seen, strict=True)]
        self.elements = [a + b for a, b in zip(self.elements or [0] * len(xs), counts, strict=True)]
        return ys

    def evaluate(self, xs: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Normalize the inputs of all ranks with their running statistics."""
        shape = (-1, *[1] * len(self.program.extent))
        ys = []
        for x, mask, own, (mean, var, _) in zip(
            xs, masks, self.parameters, self.running, strict=True
        ):
            weight, bias = [values.detach().view(shape) for values in own.values()]
            inv_std = (var + self.program.eps).rsqrt().view(shape)
            ys.append(torch.where(mask, (x - mean.view(shape)) * inv_std * weight + bias, 0.0))
        return ys

    def update(self) -> None:
        """Update the running statistics of each rank with all that it has seen."""
        by_slice = self.program.slice_stats == "sequential" and not self.program.accumulates
        for (mean, var, count), seen in zip(self.running, self.seen, strict=True):
            # Nothing, if all norm batches were empty.
            for rows in seen if by_slice or not seen else [torch.cat(seen)]:
                count += 1
                momentum = self.program.momentum or 1 / count
                mean.lerp_(rows.mean(0), momentum)
                var.lerp_(rows.var(0), momentum)
        self.seen = []


def layers_of(program: Program) -> list[Layer]:
    """Return the layers of one model, in the order of their use; a shared one stands twice."""
    layers = []
    for index, scope in enumerate(program.scopes):
        fresh = torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.zeros(())
        running = [[tensor.double() for tensor in fresh] for _ in range(program.ranks)]
        parameters = [parameters_of(program, index) for _ in range(program.ranks)]
        layers.append(Layer(program, scope, parameters, running))
    return [layers[0], layers[0]] if program.shared else layers


def of_one_process(program: Program) -> list[Tensors]:
    """Return each rank's results."""
    models = [layers_of(program) for _ in range(1 + program.twin)]
    results: list[Tensors] = [{} for _ in range(program.ranks)]
    for step in range(len(program.sizes)):
        inputs = [program.inputs(step, rank) for rank in range(program.ranks)]
        xs = [x.double().requires_grad_() for x, _, _ in inputs]
        dys = [dy.requires_grad_() for _, dy, _ in inputs]
        masks = [m if program.masked else torch.ones_like(m) for _, _, m in inputs]
        all_ys = [run_layers(program, layers, step, xs, masks) for layers in models]
        loss = torch.stack([(y * dy).sum() for y, dy in zip(all_ys[0], dys, strict=True)]).sum()
        if program.twice:
            of_x = [x for rank, x in enumerate(xs) if not program.is_detached(rank)]
            loss = loss + squared_gradients(loss, [*of_x, *trained_by(models[0])])
        loss.backward()
        for rank, (result, x, dy) in enumerate(zip(results, xs, dys, strict=True)):
            assert x.grad is not None
            assert dy.grad is not None
            result[f"ddy{step}"] = dy.grad
            if not program.is_detached(rank):
                result[f"dx{step}"] = x.grad
            for name, ys in zip(MODELS, all_ys, strict=False):
                result[f"{name}y{step}"] = ys[rank].detach()
    for rank, result in enumerate(results if program.knows_exchanges else ()):
        result["exchanges"] = torch.tensor(program.exchanges(rank))
    for name, layers in zip(MODELS, models, strict=False):
        for index, layer in enumerate(layers[: 1 if program.shared else 2]):
            if program.accumulates:
                layer.update()
            for rank, result in enumerate(results):
                key = f"{name}{index}"
                if program.tracks:
                    running = zip(("mean", "var", "count"), layer.running[rank], strict=True)
                    result.update({f"{key}.{what}": value for what, value in running})
                if program.counts_elements(rank):
                    result[f"{key}.elements"] = torch.tensor(layer.elements[rank])
                for what, parameter in layer.parameters[rank].items():
                    if parameter.grad is not None:
                        result[f"{key}.d{what}"] = parameter.grad
    if program.tracks:
        ys = run_layers(program, models[0], step, [x.detach() for x in xs], masks, training=False)
        for result, y in zip(results, ys, strict=True):
            result["evaluated"] = y
    return results


def trained_by(layers: list[Layer]) -> list[torch.Tensor]:
    """Return the parameters of all ranks that need gradients."""
    found = [p for layer in layers for own in layer.parameters for p in own.values()]
    return list(dict.fromkeys(p for p in found if p.requires_grad))


def run_layers(
    program: Program,
    layers: list[Layer],
    step: int,
    xs: list[torch.Tensor],
    masks: list[torch.Tensor],
    *,
    training: bool = True,
) -> list[torch.Tensor]:
    """Run a model on the inputs of all ranks."""
    for index, (layer, scope) in enumerate(zip(layers, program.scopes_at(step), strict=True)):
        layer.scope = scope
        given = xs if index == 0 else [h * 2 + 1 for h in xs]
        ys = (layer.forward if training else layer.evaluate)(given, masks)
        if training and not program.accumulates:
            layer.update()
        others = [RESIDUALS[program.residual](x) for x in given]
        sums = [y if r is None else y + r for y, r in zip(ys, others, strict=True)]
        ys = [program.activate(y) for y in sums]
        xs = [torch.where(mask, y, 0.0) for mask, y in zip(masks, ys, strict=True)]
    return xs
