"""The first updates of a skip-free GPT: spectral size of an update of a hidden matrix, and how alike tokens become."""
import sys, torch
from torch.nn import functional as F
import unskip
from unskip.data.config import DataConfig
from unskip.data.feed import make_feed
from unskip.data.sets import load
from unskip.train.optim import make_optimizer
from unskip.train.recipe import OptimizerConfig
torch.set_num_threads(1)
cfg = DataConfig(dataset="text", context=64, val_fraction=0.05)
data = load(cfg, sys.argv[1])
width, depth = 128, 24
for name, lr in (("adamw", 1e-3), ("adamw", 3e-3), ("adamw", 1e-4), ("muon", 1e-3), ("muon", 4e-3)):
    torch.manual_seed(0)
    m = unskip.create_model("pnnh_gpt_small_char", num_classes=data.classes, width=width, depth=depth, heads=4, context=64, hidden={width: 320})
    opt = make_optimizer(m, OptimizerConfig(optimizer=name, lr=lr, momentum=0.95 if name == "muon" else 0.9, nesterov=name == "muon", beta2=0.95, weight_decay=0.1))
    feed = make_feed(data, cfg, batch=8, seed=0)
    last = []
    h = m.blocks.register_forward_hook(lambda mod, i, o: last.append(F.normalize(o.detach(), dim=-1)))
    for step, (x, y) in zip(range(9), feed.epoch(0)):
        opt.zero_grad(); last.clear()
        loss = F.cross_entropy(m(x).transpose(1, 2), y)
        alike = (last[0] @ last[0].transpose(1, 2)).mean().item()
        if step in (0, 1, 2, 4, 8):
            print(name, lr, "updates", step, "loss %.3f" % loss.item(), "alike %.3f" % alike, flush=True)
        loss.backward()
        if step == 0:
            g = {n: m.blocks[d].attn.get_submodule(n).weight.grad.norm().item() for d in (0,) for n in "qkvo"}
            print("  gradient, block 0:", {k: "%.1e" % v for k, v in g.items()}, "last block:", {n: "%.1e" % m.blocks[-1].attn.get_submodule(n).weight.grad.norm().item() for n in "qkvo"})
        before = {n: m.blocks[12].attn.get_submodule(n).weight.detach().clone() for n in "qvo"}
        opt.step()
        if step == 0:
            print("  spectral norm of the first update / of the weight, block 12:", {n: "%.3f / %.2f" % (torch.linalg.matrix_norm(m.blocks[12].attn.get_submodule(n).weight.detach() - b, 2).item(), torch.linalg.matrix_norm(b, 2).item()) for n, b in before.items()}, flush=True)
    h.remove()
