"""A Llama in plain PyTorch, for train.py and reference.py, and its files as Hugging Face names them: config.json, model.safetensors.

Bytes are the tokens: id = byte, and byte 0 begins and ends a story. The output matrix is the embedding, transposed.
"""

import dataclasses
import json
import pathlib
import struct

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass
class Config:
    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 352
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head(self):
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def read(cls, folder):
        values = json.loads((pathlib.Path(folder) / "config.json").read_text())
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

    def write(self, folder):
        fixed = {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "mlp_bias": False,
            "model_type": "llama",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
        values = dict(sorted({**dataclasses.asdict(self), **fixed}.items()))
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def angles(config, device=None):
    """Cosines and sines of each position and each pair of a head, in float32."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head, 2, dtype=torch.float32, device=device) / config.head)
    turns = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device), frequencies)
    return turns.cos(), turns.sin()


def rotate(x, cos, sin):
    """Turns the pairs (i, i + head / 2): Hugging Face's order, not that of the first Llama."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        size, head = config.hidden_size, config.head
        self.q_proj = nn.Linear(size, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, size, bias=False)

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        q, k, v = (project(x).view(rows, length, -1, self.config.head).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = angles(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids):
        """The logits after each token: rows x length x vocabulary."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    @torch.no_grad()
    def complete(self, ids, count, choose):
        """Appends up to `count` tokens that `choose(logits)` takes; ends after a 0 and where the positions end. Without a cache of keys."""
        begun = len(ids)
        while len(ids) - begun < count and len(ids) < self.config.max_position_embeddings:
            logits = self(torch.tensor([ids], device=self.cos.device))[0, -1]
            ids.append(int(choose(logits.float())))
            if ids[-1] == 0:
                break
        return ids[begun:]


def save(model, folder):
    """In bfloat16. The same weights give the same bytes: names in order, no metadata, a header padded to 8 bytes."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    model.config.write(folder)
    header, bodies, at = {}, [], 0
    for name, tensor in sorted(model.state_dict().items()):
        body = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        header["model." + name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + len(body)]}
        bodies.append(body)
        at += len(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (pathlib.Path(folder) / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bodies))


def load(folder, device="cpu"):
    """A model in float32."""
    config = Config.read(folder)
    path = pathlib.Path(folder) / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    header, body = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    state = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"read {path}: {name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        state[name.removeprefix("model.")] = (
            torch.frombuffer(body, dtype=torch.bfloat16, count=(end - begin) // 2, offset=begin).view(entry["shape"]).float()
        )
    model = Llama(config)
    model.load_state_dict(state)
    return model.to(device).eval()
