"""Writes golden/families.npz with transformers and torch: python tests/model/make_goldens.py (needs sage-jax[parity]).

Per family: logits float32 [2, T, V] of `families.ids`, and of the gradient of the summed next-token log-probs, per tensor, its norm and
its projection on `families.probe`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.model import families

PATH = Path(__file__).parent / "golden" / "families.npz"


def reference(name: str, folder: Path):
    """(logits, {tensor: gradient}) by transformers, float32, plain attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(families.write_folder(folder, name), dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor(families.ids(name))
    logits = model(ids).logits
    logp = torch.log_softmax(logits[:, :-1], -1)
    torch.gather(logp, 2, ids[:, 1:, None]).sum().backward()
    return logits.detach().numpy(), {n: g.numpy() for n, g in _unfused(model)}


def _unfused(model):
    """Gradients by the names of the files: transformers fuses the experts in memory."""
    for name, p in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            half = p.shape[1] // 2
            for e in range(p.shape[0]):
                at = name.replace("gate_up_proj", f"{e}.")
                yield f"{at}gate_proj.weight", p.grad[e, :half]
                yield f"{at}up_proj.weight", p.grad[e, half:]
        elif name.endswith("experts.down_proj"):
            for e in range(p.shape[0]):
                yield name.replace("down_proj", f"{e}.down_proj.weight"), p.grad[e]
        else:
            yield name, p.grad


def main():
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in families.CAUSAL:
            logits, gradients = reference(name, Path(folder) / name)
            assert set(gradients) == set(families.tensors(families.FAMILIES[name])), name
            out[f"{name}/logits"] = logits
            for tensor, g in gradients.items():
                out[f"{name}/grad/{tensor}"] = np.array([np.linalg.norm(g), (g * families.probe(tensor, g.shape)).sum()])
    PATH.parent.mkdir(exist_ok=True)
    np.savez_compressed(PATH, **out)
    print(f"{PATH}: {PATH.stat().st_size / 1e3:.0f} kB, {len(out)} arrays")


if __name__ == "__main__":
    main()
