"""Faults that layouts have had, each planted in a process before a case is run, and the case that must find it.

A fault is a function that puts something wrong in the place of a part of the product. It is planted in the processes
of the layout only: the reference is computed without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from cases import TOKENS
from torch.distributed.fsdp import FSDPModule

import kforge_model.core
import kforge_model.head_loss
import kforge_model.init
import kforge_model.losses
import kforge_model.moe.layer
import kforge_model.norm
import kforge_model.transformer
import kforge_optim.adamw
import kforge_optim.clip
import kforge_parallel.activation
import kforge_parallel.build
import kforge_parallel.collectives
import kforge_parallel.context
import kforge_parallel.expert
import kforge_parallel.kept
import kforge_parallel.mesh
import kforge_parallel.offload
import kforge_parallel.partial_attention
import kforge_parallel.pipeline
import kforge_parallel.ring
import kforge_parallel.tensor
import kforge_train.engine
import kforge_train.evaluate


@dataclass(frozen=True)
class Mutation:
    """A fault and what finds it."""

    what: str
    """The fault in words."""
    plant: Callable[[], None]
    layout: str
    model: str
    """A model of cases.py, or "foreign"."""
    variant: str
    kind: str
    """What must differ: a kind of `kforge_parallel.testing`, or the words of the error that must come."""
    possible: bool = True
    """Whether it can be committed under this torch."""


MUTATIONS: dict[str, Mutation] = {}


def mutation(what: str, layout: str, model: str = "untied", variant: str = "packed", kind: str = "gradients", **more):
    def register(function: Callable[[], None]) -> Callable[[], None]:
        MUTATIONS[function.__name__.replace("_", "-")] = Mutation(what, function, layout, model, variant, kind, **more)
        return function

    return register


def plant(name: str) -> None:
    """Put the fault into this process."""
    MUTATIONS[name].plant()


def take_for_another_rank(name: str, rank_of: Callable[[object], int]) -> None:
    """Let a method of tensor parallelism's `_Split` take its rank for another."""
    method = getattr(kforge_parallel.tensor._Split, name)

    def other(self, *args):
        rank, self.rank = self.rank, rank_of(self)
        try:
            return method(self, *args)
        finally:
            self.rank = rank

    setattr(kforge_parallel.tensor._Split, name, other)


# ---------------------------------------------------------------------------------------------------- sums


@mutation("the divide factor is set on the root only", "shard2")
def factor_on_the_root_only():
    setter, seen = FSDPModule.set_gradient_divide_factor, []

    def set_factor(self, factor):
        if not seen:  # the root is the first of a model's modules
            seen.append(self)
            setter(self, factor)

    FSDPModule.set_gradient_divide_factor = set_factor


@mutation("gradients are means over ranks", "shard2")
def mean_instead_of_sum():
    shard = kforge_parallel.build.shard
    kforge_parallel.build.shard = lambda *args, **kw: shard(*args, **{**kw, "gradients": "mean"})


@mutation("replicas do not sum their gradients", "rep2")
def replicas_not_summed():
    flag = kforge_train.engine.set_last_microbatch

    def shards_only(model, last):
        flag(model, last)
        model.set_requires_all_reduce(False)

    kforge_train.engine.set_last_microbatch = shards_only


@mutation("each rank counts its own tokens only", "shard2")
def tokens_counted_locally():
    kforge_train.engine.dist = SimpleNamespace(all_reduce=lambda *args, **kw: None)


@mutation("tokens are counted once for every tensor-parallel rank", "tp2")
def tokens_counted_for_each_copy():
    kforge_parallel.mesh.Mesh.copies = property(lambda self: 1)


@mutation("the mean of microbatch means", "one", variant="packed-3")
def means_of_microbatches():
    whole = kforge_train.engine.PlainEngine.forward_backward

    def forward_backward(self, window, scale):
        parts = []
        for batch in window:
            here = (batch["labels"] != -100).sum().clamp(min=1).to(torch.float64)
            parts.append(whole(self, [batch], 1 / here / len(window)))
        return torch.stack(parts).sum()

    kforge_train.engine.PlainEngine.forward_backward = forward_backward


@mutation("gradients are reduced in all microbatches but the last", "shard2", variant="packed-3")
def last_microbatch_inverted():
    flag = kforge_train.engine.set_last_microbatch
    kforge_train.engine.set_last_microbatch = lambda model, last: flag(model, not last)


@mutation("gradients of the step before are left in place", "one")
def gradients_not_dropped():
    import kforge_optim

    kforge_optim.Optimizer.zero_grad = lambda self: None


# ---------------------------------------------------------------------------------------------------- the batch


@mutation("positions run on over the documents of a row", "one")
def positions_not_reset():
    rows_of = kforge_train.engine.rows_of

    def running_on(batch):
        rows = rows_of(batch)
        return replace(rows, position_ids=torch.arange(rows.position_ids.shape[1]).expand_as(rows.position_ids) % 7)

    kforge_train.engine.rows_of = running_on


@mutation("documents of a row see one another", "one")
def document_mask_dropped():
    rows_of = kforge_train.engine.rows_of
    kforge_train.engine.rows_of = lambda batch: replace(rows_of(batch), doc_ids=None, cu_seqlens=None)


@mutation("ranks of a tensor-parallel group read different rows", "shard2-tp2")
def data_rank_differs_over_tp():
    kforge_parallel.mesh.Mesh.data_rank = property(lambda self: self.rank % self.data_size)


@mutation("all data ranks read the same rows", "shard2")
def data_rank_always_0():
    kforge_parallel.mesh.Mesh.data_rank = property(lambda self: 0)


@mutation("evaluation counts rows of padding", "shard2", kind="evaluation")
def padding_evaluated():
    batches = kforge_train.evaluate.evaluation_batches

    def scored(*args, **kw):
        for batch in batches(*args, **kw):
            empty = (batch["labels"] == -100).all(1, keepdim=True)
            yield {**batch, "labels": batch["labels"].masked_fill(empty, 0)}

    kforge_train.evaluate.evaluation_batches = scored


@mutation("evaluation is each rank's own", "shard2", kind="evaluation")
def evaluation_not_summed():
    kforge_train.evaluate.dist = SimpleNamespace(all_reduce=lambda *args, **kw: None)


# ---------------------------------------------------------------------------------------------------- weights


@mutation("every shard is filled with the same numbers", "shard2", kind="the same numbers in its part")
def same_values_on_all_shards():
    kforge_model.init.local_box = lambda tensor: (tensor.to_local(), (0,) * tensor.ndim)


@mutation("every tensor-parallel part is filled with the same numbers", "tp2", kind="the same numbers in its part")
def same_values_on_all_parts():
    kforge_model.init.local_box = lambda tensor: (tensor.to_local(), (0,) * tensor.ndim)


@mutation("embedding and head come untied", "shard2", "tied")
def untied():
    _untie()
    kforge_parallel.build._tied = lambda model: []


@mutation("embedding and head come untied, noticed while building", "shard2", "tied", kind="changed the names or the")
def untied_and_noticed():
    _untie()


def _untie():
    shard = kforge_parallel.build.shard

    def apart(model, *args, **kw):
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        kforge_model.transformer.Transformer.tie = lambda self: None
        shard(model, *args, **kw)

    kforge_parallel.build.shard = apart


@mutation("ranks keep random values of their own", "shard2", "foreign")
def values_not_shared():
    kforge_parallel.build._share_values = lambda model, mesh: None


@mutation("ranks take each other's part of a weight", "tp2", "foreign")
def parts_exchanged():
    cut = kforge_parallel.tensor.cut

    def of_the_next(parameter, mesh, placement):
        if placement.is_shard():
            by = parameter.shape[placement.dim] // mesh.size()
            parameter = torch.nn.Parameter(parameter.detach().roll(-by, placement.dim))
        return cut(parameter, mesh, placement)

    kforge_parallel.tensor.cut = of_the_next


@mutation("an entry of the plan matches nothing", "tp2", kind="matches no module and no parameter")
def plan_entry_without_match():
    whole = kforge_model.transformer._whole_plan
    kforge_model.transformer._whole_plan = lambda model: {**whole(model), "layers.*.mlp.w_gate": "colwise"}


@mutation("the plan forgets a weight", "tp2", kind="the plan says nothing of")
def plan_without_a_weight():
    whole = kforge_model.transformer._whole_plan
    kforge_model.transformer._whole_plan = lambda model: {n: w for n, w in whole(model).items() if n != "norm"}


# ---------------------------------------------------------------------------------------------------- optimizer


@mutation("each rank clips by the norm of its own shards", "shard2", kind="norm")
def clip_by_local_norm():
    alone = SimpleNamespace(**{name: getattr(dist, name) for name in ("is_available", "is_initialized", "ReduceOp")})
    alone.get_world_size, alone.all_reduce = dist.get_world_size, lambda *args, **kw: None
    kforge_optim.clip.dist = alone


@mutation("the norm counts weights that all tensor-parallel ranks hold once for each", "tp2", kind="norm")
def norm_counts_copies():
    kforge_optim.clip.distinct_shards = lambda parameter: dist.get_world_size()


@mutation("a rank leaves out the update of a weight", "shard2", kind="weights")
def shard_not_stepped():
    update = kforge_optim.adamw.AdamW.update

    def all_but_one(self, slots, **kw):
        update(self, slots[1:] if dist.get_rank() == 1 else slots, **kw)

    kforge_optim.adamw.AdamW.update = all_but_one


# ---------------------------------------------------------------------------------------------------- tensor parallel


@mutation("gradients of norms are not summed under sequence parallelism", "tp2")
def norm_gradient_not_summed():
    kforge_parallel.tensor.summed = lambda weight, group: weight


@mutation("gradients of head norms are not summed", "tp2-whole", "qk-norm", "plain")
def head_norm_gradient_not_summed():
    kforge_parallel.tensor.summed = lambda weight, group: weight


@mutation("the gradient at the entry of a split product is not summed", "tp2-whole")
def entry_gradient_not_summed():
    kforge_parallel.collectives._Copy.backward = staticmethod(lambda ctx, grad: (grad, None))


@mutation("the gradient at the exit of a split product is summed once more", "tp2-whole")
def exit_gradient_summed():
    backward = staticmethod(lambda ctx, grad: (grad * 2, None))
    kforge_parallel.collectives._Reduce.backward = backward


@mutation("parts of rows are joined in the wrong order", "tp2")
def joined_in_wrong_order():
    join = kforge_parallel.collectives.join_parts

    def turned(x, group, dim):
        return join(x, group, dim).roll(x.shape[dim], dim)

    kforge_parallel.collectives.join_parts = turned


@mutation("a rank takes the wrong one of the shared key/value heads", "tp4")
def wrong_kv_head():
    take_for_another_rank("own_group_rows", lambda split: (split.rank + 2) % split.size)


@mutation("a rank takes another's queries of a shared key/value head", "tp4")
def wrong_queries_of_a_group():
    take_for_another_rank("own_group_rows", lambda split: split.rank ^ 1)


@mutation("a norm across all heads is that of a rank's own", "tp2", "post")
def norm_across_own_heads_only():
    kforge_parallel.tensor._Split.tell_group = lambda self, name, module, words: None


@mutation("the gradient of a norm across all heads stays with each rank", "tp2", "post")
def norm_across_heads_gradient_not_summed():
    backward = staticmethod(lambda ctx, grad: (grad / ctx.group.size(), None))
    kforge_model.norm._MeanOverRanks.backward = backward


@mutation("sinks of the first heads on every rank", "tp2", "sinks", "plain")
def sinks_of_the_first_heads():
    core = kforge_model.core.AttentionCore
    attend = core.forward
    first = {}

    def forward(self, q, k, v, rows, sinks=None):
        if dist.get_rank() == 1:
            sinks = first.setdefault(id(self), torch.zeros_like(sinks)) + sinks * 0
        return attend(self, q, k, v, rows, sinks)

    core.forward = forward


@mutation("rows of padding take part in the softmax", "tp2", "padded", "plain")
def padding_takes_probability():
    loss = kforge_model.head_loss.HeadLoss.__init__

    def init(self, dim, vocab_size, *args, rows=None, **kw):
        loss(self, dim, rows or vocab_size, *args, rows=rows, **kw)

    kforge_model.head_loss.HeadLoss.__init__ = init


@mutation("further tokens are predicted across the ends of documents", "shard2", "further")
def further_tokens_across_documents():
    later = kforge_model.transformer.later_labels
    kforge_model.transformer.later_labels = lambda labels, rows, depth: later(
        labels, replace(rows, doc_ids=None, cu_seqlens=None), depth
    )


@mutation("gradients of shared key/value heads are not summed", "tp4")
def shared_kv_gradient_not_summed():
    summed = kforge_parallel.tensor.summed
    kforge_parallel.tensor.summed = lambda weight, group: weight if weight.ndim > 1 else summed(weight, group)


@mutation("a bias is added by every rank before the sum", "tp2", "foreign")
def bias_on_every_rank():
    replace_forward = kforge_parallel.tensor._replace_forward

    def with_bias_inside(module, **kw):
        replace_forward(module, **{**kw, "bias": None})

    kforge_parallel.tensor._replace_forward = with_bias_inside


@mutation("the loss takes each rank's own greatest logit", "tp2")
def loss_without_maximum():
    _loss_without(dist.ReduceOp.MAX)


@mutation("the loss takes each rank's own sum of exponentials", "tp2")
def loss_without_sum():
    _loss_without(dist.ReduceOp.SUM)


def _loss_without(left_out):
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        if op != left_out:
            dist.all_reduce(tensor, op, group)

    kforge_model.losses.dist = SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp)


@mutation("every rank's part of the vocabulary starts at 0 in the loss", "tp2")
def loss_vocabulary_starts_at_0():
    options = kforge_model.head_loss.LossOptions
    kforge_model.head_loss.LossOptions = lambda **kw: options(**{**kw, "vocab_start": 0})


@mutation("every rank's part of the vocabulary starts at 0 in the embedding", "tp2")
def embedding_vocabulary_starts_at_0():
    take_for_another_rank("look_up_own_rows", lambda split: 0)


# ---------------------------------------------------------------------------------------------------- recomputation


@mutation("a block that is run again forgets where its input came from", "one", variant="packed-full")
def recomputed_from_a_copy():
    checkpoint = kforge_parallel.activation.checkpoint

    def cut_off(forward, x, *args, **kw):
        return checkpoint(forward, x.detach().requires_grad_(), *args, **kw)

    kforge_parallel.activation.checkpoint = cut_off


@mutation(
    "what a transfer gave is kept for the transfer after it", "tp2", variant="selective-3", kind="invalid for input"
)
def kept_out_of_order():
    enter = kforge_parallel.kept._During.__enter__

    def reversed_when_run_again(self):
        enter(self)
        if self.start == 0:
            self.kept.results.reverse()

    kforge_parallel.kept._During.__enter__ = reversed_when_run_again


@mutation("what comes back from host memory is a number off", "shard2", variant="offloaded-3")
def offloaded_a_number_off():
    away = kforge_parallel.offload._Away.__init__

    def late(self, trip, tensor):
        away(self, trip, tensor)
        if tensor.is_floating_point():
            self.host.view(torch.uint8).copy_(self.host.roll(8))

    kforge_parallel.offload._Away.__init__ = late


# ---------------------------------------------------------------------------------------------------- experts


@mutation("gradients of experts are as many times too large as ranks share them", "shard2-ep2", "experts")
def expert_gradients_times_ep():
    backward = kforge_parallel.expert._Combine.backward

    def larger(ctx, grad):
        rows, weights, route = backward(ctx, grad)
        return rows * ctx.group.size(), weights, route

    kforge_parallel.expert._Combine.backward = staticmethod(larger)


@mutation("ranks that share experts read the same rows", "shard2-ep2", "experts")
def same_rows_on_expert_ranks():
    kforge_parallel.mesh.Mesh.data_rank = property(lambda self: 0)


@mutation("every rank starts its experts from the same numbers", "shard2-ep2", "experts", kind="same numbers")
def same_experts_everywhere():
    box = kforge_model.init.local_box

    def local_box(tensor):
        local, offset = box(tensor)
        names = tensor.device_mesh.mesh_dim_names or ()
        return local, (0, *offset[1:]) if "ep" in names else offset

    kforge_model.init.local_box = local_box


@mutation("rows of an expert come back in another order", "shard2-ep2", "experts")
def rows_come_back_in_another_order():
    wait = kforge_parallel.expert.Route.wait

    def unsorted(self):
        wait(self)
        self.by_rank = self.by_expert

    kforge_parallel.expert.Route.wait = unsorted


@mutation("a token's weight is that of its other expert", "shard2-ep2", "experts")
def weights_of_the_other_expert():
    exchange = kforge_parallel.expert.AllToAllExchange.forward

    def forward(self, x, ids, weights, experts):
        return exchange(self, x, ids, weights.flip(1), experts)

    kforge_parallel.expert.AllToAllExchange.forward = forward


@mutation("the shared experts are left out", "shard2-ep2", "experts-bias")
def no_shared_experts():
    whole = kforge_model.moe.layer.MoE.forward

    def forward(self, x, rows=None):
        return whole(self, x, rows) - 0.5 * self.shared(x)  # one of the two

    kforge_model.moe.layer.MoE.forward = forward


@mutation(
    "the bias moves whenever a block is run", "shard2-ep2", "experts-bias", "packed-3-full", "would change it twice"
)
def bias_moves_in_forward():
    balanced = kforge_model.moe.layer.balanced

    def moving(y, routing, kept, scale, config, sum_counts, tally):
        loads = torch.bincount(routing.ids.flatten(), minlength=config.n_experts)[None].double()
        for router in routers:
            router.bias += config.router_bias_rate * kforge_model.transformer.bias_step(loads)[0]
        return balanced(y, routing, kept, scale, config, sum_counts, tally)

    routers = []
    init = kforge_model.moe.layer.MoE.__init__

    def remember(self, *args):
        init(self, *args)
        routers.append(self.router)

    kforge_model.moe.layer.MoE.__init__ = remember
    kforge_model.moe.layer.balanced = moving


@mutation("each rank moves the bias by its own load", "shard2-ep2", "experts-bias", kind="weights")
def bias_by_own_load():
    counted = kforge_model.transformer.Transformer._counted
    kforge_model.transformer.Transformer._counted = lambda self, mixtures, _: counted(self, mixtures, None)


@mutation("the balance loss weighs more with more microbatches", "shard2-ep2", "experts", "packed-3")
def balance_loss_grows_with_microbatches():
    balanced = kforge_model.moe.layer.balanced
    kforge_model.moe.layer.balanced = lambda y, routing, kept, scale, *rest: balanced(
        y, routing, kept, scale * 3, *rest
    )


@mutation("the balance loss sees the part of a row that a rank has", "tp2-ep2", "experts")
def balance_of_a_part_of_a_row():
    kforge_parallel.expert.AllToAllExchange.sum_counts = lambda self, counts: counts


@mutation("experts that every tensor-parallel rank holds do not sum their gradients", "tp2", "experts")
def experts_not_summed_over_tp():
    summed = kforge_parallel.tensor.summed
    kforge_parallel.tensor.summed = lambda weight, group: weight if weight.ndim > 2 else summed(weight, group)


# ---------------------------------------------------------------------------------------------------- context parallel


def change_parts(change):
    """Let ``change(part, whole)`` alter what a rank gets of a microbatch in training."""
    shard_rows = kforge_train.engine.shard_rows

    def changed(batch, mesh):
        part = shard_rows(batch, mesh)
        return {**part, **change(part, batch)}

    kforge_train.engine.shard_rows = changed


@mutation("context ranks are left out of the count of tokens", "cp2")
def tokens_of_a_context_rank():
    kforge_train.engine.dist = SimpleNamespace(all_reduce=lambda *args, **kw: None)


@mutation("context ranks are taken for copies", "cp2")
def context_ranks_are_copies():
    kforge_parallel.mesh.Mesh.copies = property(lambda self: self.size // self.data_size)


@mutation("positions begin anew behind a cut", "cp2", variant="plain")
def positions_begin_at_the_cut():
    change_parts(lambda part, whole: {"position_ids": part["position_ids"] % (TOKENS // 2)})


@mutation("positions begin anew behind a cut, where heads are exchanged", "cp2-ulysses")
def positions_begin_at_the_cut_of_ulysses():
    change_parts(lambda part, whole: {"position_ids": part["position_ids"] - part["position_ids"][:, :1]})


@mutation("labels are made after the cut", "cp2")
def labels_lost_at_the_cut():
    def change(part, whole):
        last = torch.isin(torch.arange(part["labels"].shape[1]), torch.tensor([3, 7]))  # of each chunk
        return {"labels": part["labels"].masked_fill(last, -100)}

    change_parts(change)


@mutation("documents see one another where they are on other ranks", "cp2")
def documents_unknown_behind_the_cut():
    change_parts(lambda part, whole: {"whole": {**whole, "doc_ids": None, "cu_seqlens": None}})


@mutation("chunks of keys are taken in the order in which they come", "cp2")
def chunks_not_sorted():
    kforge_parallel.context._GatherRows.forward = staticmethod(
        lambda ctx, x, group: (
            setattr(ctx, "group", group),
            setattr(ctx, "order", [0, 3, 1, 2]),
            kforge_parallel.context.join_parts(x, group, 2),
        )[-1]
    )


@mutation("gradients of keys and values stay where they are made", "cp2")
def key_gradients_not_summed():
    def own_part(x, group, dim):
        return x.chunk(group.size(), dim)[group.rank()].contiguous()

    kforge_parallel.context.sum_own_part = own_part


@mutation("shared key/value heads go to the wrong queries", "cp4-ulysses")
def heads_repeated_in_turn():
    core = kforge_parallel.context.UlyssesCore
    attend = core.attend

    def turned(self, q, k, v, rows, sinks):
        return attend(self, q, k.flip(1), v.flip(1), rows, sinks)

    core.attend = turned


@mutation("sinks of the first heads on every context rank", "cp2-ulysses", "sinks", "plain")
def sinks_of_the_first_heads_over_cp():
    call = kforge_parallel.context._call
    first = {}

    def first_ones(core, q, k, v, rows, sinks):
        if dist.get_rank() == 1:
            sinks = first.setdefault(id(core), torch.zeros_like(sinks)) + sinks * 0
        return call(core, q, k, v, rows, sinks)

    kforge_parallel.context._call = first_ones


@mutation("parts of a softmax are added as they are", "cp2-ring")
def ring_without_rescale():
    merge = kforge_parallel.ring.merge
    kforge_parallel.ring.merge = lambda out, lse, other, other_lse: (out + other, merge(out, lse, other, other_lse)[1])


@mutation("the backward of a part takes the part's own softmax for the whole", "cp2-ring")
def ring_backward_of_each_part():
    kernel = kforge_parallel.ring.KERNELS["exact"]

    def backward(grad, q, k, v, out, lse, pair, scale):
        mine, own = kernel.forward(q, k, v, pair, scale)
        return kernel.backward(grad, q, k, v, mine, own.where(own.isfinite(), lse), pair, scale)

    kforge_parallel.ring.KERNELS = {"exact": kernel._replace(backward=backward)}


@mutation("gradients of keys in a ring come back one rank short", "cp4-ring")
def ring_gradients_one_step_short():
    backward = kforge_parallel.ring._RingAttention.backward

    def short(ctx, grad):
        dq, dk, dv, none = backward(ctx, grad)
        dk, dv = (kforge_parallel.ring.Transfer(x, ctx.ring.group).wait() for x in (dk, dv))
        return dq, dk, dv, none

    kforge_parallel.ring._RingAttention.backward = staticmethod(short)


@mutation("a ring turns the other way than its pairs say", "cp4-ring")
def ring_turns_backwards():
    global_rank = dist.get_global_rank
    alone = SimpleNamespace(**{name: getattr(dist, name) for name in ("batch_isend_irecv", "P2POp", "isend", "irecv")})
    alone.get_global_rank = lambda group, rank: global_rank(group, (2 * group.rank() - rank) % group.size())
    kforge_parallel.ring.dist = alone


@mutation("documents see one another in a ring", "cp2-ring")
def ring_without_documents():
    pair = kforge_parallel.ring.Pair
    kforge_parallel.ring.Pair = lambda *args: replace(pair(*args), docs=None)


@mutation("the balance loss sees the part of a row that a context rank has", "cp2", "experts")
def balance_of_a_context_rank():
    kforge_parallel.expert._sum_over = lambda groups, counts: counts


# ---------------------------------------------------------------------------------------------------- pipelines


SPLIT = {"possible": kforge_parallel.pipeline.SPLITS_BACKWARD}


@mutation("weights are freed between the halves of a backward", "shard2-pp2-zero", "deep-tied", "packed-6", **SPLIT)
def freed_under_zero_bubble():
    kforge_parallel.build.keeps_gathered = lambda config, mesh: False


@mutation("weights are freed between DualPipeV's halves", "shard2-pp2-dual", "deep-tied", "packed-6", **SPLIT)
def freed_under_dualpipev():
    kforge_parallel.build.keeps_gathered = lambda config, mesh: False


@mutation("a schedule divides gradients by the number of microbatches", "pp2", "deep-tied", "packed-3")
def scale_grads_left_on():
    torch_s = kforge_parallel.pipeline.pipelining
    kforge_parallel.pipeline.pipelining = SimpleNamespace(
        PipelineStage=torch_s.PipelineStage,
        Schedule1F1B=lambda *args, **kw: torch_s.Schedule1F1B(*args, **{**kw, "scale_grads": True}),
    )


@mutation("stages take the rows of the first microbatch for all", "pp2", "deep", "packed-3")
def rows_of_the_first_microbatch():
    forward = kforge_parallel.pipeline.StageCall.forward
    kforge_parallel.pipeline.StageCall.forward = lambda self, *hidden, number: forward(
        self, *hidden, number=0 if hidden else number
    )


@mutation("both ends of a tied embedding keep their own gradient", "pp2", "deep-tied", "packed-3", "copies of embed.w")
def ends_not_summed():
    kforge_parallel.pipeline.Pipeline._sum_shared = lambda self: None


@mutation("the head's part of a tied gradient is lost where one rank has both ends", "pp2-zbv", "deep-tied", "packed-3")
def gradient_of_the_twin_lost():
    kforge_parallel.pipeline.Pipeline._sum_shared = lambda self: None


@mutation(
    "the head of a rank with both ends keeps the first values of the embedding", "pp2-zbv", "deep-tied", "packed-3"
)
def values_of_the_twin_kept():
    running = kforge_parallel.pipeline.Pipeline._running

    def stale(self, *args):
        kforge_parallel.pipeline.refresh_twins = lambda model: None
        return running(self, *args)

    kforge_parallel.pipeline.Pipeline._running = stale


@mutation("the norm counts a tied embedding at both ends", "pp2", "deep-tied", "packed-3", "norm")
def norm_counts_both_ends():
    kforge_parallel.pipeline.Pipeline.copies = property(lambda self: {})


@mutation("the norm takes stages for copies of one another", "pp2", "deep", "packed-3", "norm")
def norm_takes_stages_for_copies():
    total = kforge_optim.clip.total_norm
    kforge_optim.clip.total_norm = lambda model, **kw: total(model, **{**kw, "stages": 1})


@mutation("the loss is divided by stages that do not have it", "pp2", "deep", "packed-3", "loss")
def loss_divided_by_stages():
    part = kforge_train.engine.PipelineEngine._part
    kforge_train.engine.PipelineEngine._part = lambda self, sums: part(self, sums) / self.mesh.pp_size


@mutation("experts before the last stage have no losses of their own", "pp2", "deep-experts", "packed-3")
def experts_of_early_stages_without_losses():
    stage_of = kforge_train.engine.PipelineEngine._stage

    def silent(self, stage, x, batch, scale):
        return stage_of(self, stage, x, batch, scale if stage.head is not None else scale * 0)

    kforge_train.engine.PipelineEngine._stage = silent


@mutation(
    "each stage moves its routers' biases by its own replica's load",
    "shard2-pp2",
    "deep-experts",
    "packed-3",
    "weights",
)
def bias_by_the_load_of_a_replica():
    counted = kforge_model.transformer.Transformer._counted
    kforge_model.transformer.Transformer._counted = lambda self, layers, _: counted(self, layers, None)
