"""Plain float64 implementation of the published models that computes one position and one head at a time."""

import math

import torch
import torch.nn.functional as F


def random_weights(config: dict, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Draw the tensors of a model with compose weights that are large enough to affect the logits."""
    generator = torch.Generator().manual_seed(seed)
    E, H, V = config["dim"], config["n_head"], config["vocab_size"]
    F_, D, pythia = config["intermediate_size"], E // H, config["model_type"] == "dcpythia"
    bias = pythia and config["use_linear_bias"]

    def draw(*shape, std=None):
        std = 1 / math.sqrt(shape[-1]) if std is None else std
        return std * torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"tok_embeddings.weight": draw(V, E, std=1.0), "output.weight": draw(V, E)}
    norms, linears = ["norm"], {}
    for i in range(config["n_layer"]):
        layer, attention, mlp = f"layers.{i}", f"layers.{i}.attention", f"layers.{i}.feed_forward"
        norms += [f"{layer}.attention_norm", f"{layer}.ffn_norm"]
        linears |= {
            f"{attention}.wqkv": (3 * E, E),
            f"{attention}.wo": (E, E),
            f"{mlp}.w1": (F_, E),
            f"{mlp}.w2": (E, F_),
        }
        if not pythia:
            linears[f"{mlp}.w3"] = (F_, E)
            if config.get("mgate"):
                tensors[f"{mlp}.mg.weight"] = draw(config["mgate_dim"], E)
        if config["use_qk_norm"]:
            for name in ("q_norm", "k_norm"):
                tensors[f"{attention}.{name}.scale"] = 1 + draw(D, std=0.3)
        tensors[f"{attention}.dyn_w_proj.dw1"] = draw(E, 1, 4, 4 * H, std=1 / math.sqrt(E))
        tensors[f"{attention}.dyn_w_proj.qkw"] = scale * draw(1, 4, 4 * H, 4, H, std=0.3)
        tensors[f"{attention}.dyn_w_proj.dd"] = draw(E, 1, 4 * H, std=0.7 / math.sqrt(E))
    for name, shape in linears.items():
        tensors[f"{name}.weight"] = draw(*shape)
        if bias:
            tensors[f"{name}.bias"] = draw(shape[0], std=0.3)
    for name in norms:
        tensors[f"{name}.weight"] = 1 + draw(E, std=0.2)
        if pythia:
            tensors[f"{name}.bias"] = draw(E, std=0.2)
    return tensors


def local_layers(config: dict) -> list[bool]:
    pattern = {None: "LG", "LG": "LG", "LGLL": "LGLL", "LGL6": "LGLLLLLL"}[config["window_type"]]
    is_local = [pattern[i % len(pattern)] == "L" for i in range(config["n_layer"])]
    return is_local if config["window_size"] is not None else [False] * config["n_layer"]


def logits(config: dict, w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Return the next-token logits [T, V] of one text."""
    pythia = config["model_type"] == "dcpythia"
    x = w["tok_embeddings.weight"][ids]
    for i, is_local in enumerate(local_layers(config)):
        layer = f"layers.{i}"
        window = config["window_size"] if is_local else None
        attended = attention(config, w, f"{layer}.attention", norm(config, w, f"{layer}.attention_norm", x), window)
        if pythia and config["use_parallel_residual"]:
            x = x + attended + mlp(config, w, f"{layer}.feed_forward", norm(config, w, f"{layer}.ffn_norm", x))
        else:
            x = x + attended
            x = x + mlp(config, w, f"{layer}.feed_forward", norm(config, w, f"{layer}.ffn_norm", x))
    return norm(config, w, "norm", x) @ w["output.weight"].T


def norm(config, w, name, x):
    if config["model_type"] == "dcpythia":
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + config["norm_eps"]).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]
    return x / (x.square().mean(-1, keepdim=True) + config["norm_eps"]).sqrt() * w[f"{name}.weight"]


def linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def mlp(config, w, name, x):
    hidden = linear(w, f"{name}.w1", x)
    if config["model_type"] == "dcpythia":
        return linear(w, f"{name}.w2", F.gelu(hidden))
    hidden = F.silu(hidden) * linear(w, f"{name}.w3", x)
    if config.get("mgate"):
        groups = config["mgate_dim"]
        p = (x @ w[f"{name}.mg.weight"].T).softmax(-1)
        size = hidden.shape[-1] // groups
        hidden = torch.cat([hidden[:, e * size : (e + 1) * size] * p[:, e : e + 1] for e in range(groups)], -1)
    return linear(w, f"{name}.w2", hidden)


def turn(config, vector: torch.Tensor, position: int) -> torch.Tensor:
    """Apply the rotary embedding to the vector of one head, pair by pair."""
    D = len(vector)
    turning = int(D * config["rotary_pct"]) if config["model_type"] == "dcpythia" else D
    out = vector.clone()
    for j in range(turning // 2):
        angle = position * config["rope_base"] ** (-2 * j / turning)
        a, b = vector[j], vector[j + turning // 2]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + turning // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(config, w, name, x, window):
    E, H = config["dim"], config["n_head"]
    T, D = len(x), E // H
    qkv = linear(w, f"{name}.wqkv", x)
    q, k, v = (part.reshape(T, H, D) for part in qkv.split(E, -1))
    if config["use_qk_norm"]:
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.q_norm.scale"]
        k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.k_norm.scale"]
    q, k = (torch.stack([torch.stack([turn(config, h, t) for h in a[t]]) for t in range(T)]) for a in (q, k))
    roles = [token_matrices(config, w, f"{name}.dyn_w_proj", x, c) for c in range(4)]
    out = torch.zeros(T, H, D, dtype=x.dtype)
    for t in range(T):
        first = 0 if window is None else max(0, t - window + 1)
        scores = torch.stack([(q[t] * k[u]).sum(-1) / math.sqrt(D) for u in range(first, t + 1)])  # [keys, H]
        if config["use_dcmha"]:
            scores = torch.stack([a @ (roles[0][t] + roles[1][first + n]) + a for n, a in enumerate(scores)])
        weights = scores.softmax(0)
        if config["use_dcmha"]:
            weights = torch.stack([a @ (roles[2][t] + roles[3][first + n]) + a for n, a in enumerate(weights)])
        out[t] = (weights[:, :, None] * v[first : t + 1]).sum(0)
    return linear(w, f"{name}.wo", out.reshape(T, E))


def token_matrices(config, w, name, x, c):
    """Return the matrices [T, H, H] that each position adds to the identity in slot c; they act on a row of heads."""
    H = config["n_head"]
    if config["query_wise"] and c in (1, 3):
        return torch.zeros(len(x), H, H, dtype=x.dtype)
    z = torch.einsum("tk,krh->trh", F.gelu(x @ w[f"{name}.dw1"][:, 0, c]), w[f"{name}.qkw"][0, c])
    w1, w2 = z[:, :2], z[:, 2:]
    w1 = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = torch.tanh(x @ w[f"{name}.dd"][:, 0, c * H : (c + 1) * H])
    return torch.einsum("tra,trb->tab", w1, w2) + torch.diag_embed(gate)
