"""Neck, encoder, selection and decoder of DINO and Co-DINO on original key names, image by image."""

import math

import torch
import torch.nn.functional as F

from .backbones import layer_norm, linear, resnet, swin
from .vit import pyramid, vit

# Names of the parts: IDEA-Research's DINO, and Co-DETR's Co-DINO.
NAMES = {
    "dino": {
        "root": "transformer.",
        "level": "transformer.level_embed",
        "query": "transformer.tgt_embed.weight",
        "enc_attn": "self_attn",
        "enc_norms": ("norm1", "norm2"),
        "self_attn": "self_attn",
        "cross_attn": "cross_attn",
        "dec_norms": ("norm2", "norm1", "norm3"),
        "ffn": ("linear1", "linear2"),
        "ref": ("layers.0", "layers.1"),
    },
    "co_dino": {
        "root": "query_head.transformer.",
        "level": "query_head.transformer.level_embeds",
        "query": "query_head.transformer.query_embed.weight",
        "enc_attn": "attentions.0",
        "enc_norms": ("norms.0", "norms.1"),
        "self_attn": "attentions.0.attn",
        "cross_attn": "attentions.1",
        "dec_norms": ("norms.0", "norms.1", "norms.2"),
        "ffn": ("ffns.0.layers.0.0", "ffns.0.layers.1"),
        "ref": ("0", "2"),
    },
}
HEADS = 8


class Reference:
    """w: original state dict. layout: "dino" or "co_dino". groups: of GroupNorm. window: of Swin. windowed: blocks of ViT."""

    def __init__(self, w, layout, *, levels, stages, groups, window=None, windowed=None):
        self.w, self.layout, self.n = w, layout, NAMES[layout]
        self.levels, self.stages, self.groups, self.window = levels, stages, groups, window
        self.windowed = windowed

    def backbone(self, image):
        p = "backbone.0." if self.layout == "dino" else "backbone."
        if self.windowed is not None:
            return vit(self.w, image, self.windowed)
        if self.window:
            return swin(self.w, p, image, self.stages, self.window)
        return resnet(self.w, p + ("body." if self.layout == "dino" else ""), image, self.stages)

    def neck(self, maps):
        if self.windowed is not None:
            return pyramid(self.w, maps[0])
        found = []
        for level in range(self.levels):
            extra = level - len(maps)
            if self.layout == "dino":
                conv, norm = f"input_proj.{level}.0", f"input_proj.{level}.1"
            else:
                part = f"neck.convs.{level}" if extra < 0 else f"neck.extra_convs.{extra}"
                conv, norm = f"{part}.conv", f"{part}.gn"
            x = maps[level] if extra < 0 else maps[-1] if extra == 0 else found[-1]
            options = {} if extra < 0 else {"stride": 2, "padding": 1}
            x = F.conv2d(x, self.w[f"{conv}.weight"], self.w.get(f"{conv}.bias"), **options)
            found.append(F.group_norm(x, self.groups, self.w[f"{norm}.weight"], self.w[f"{norm}.bias"], 1e-5))
        return found

    def attention(self, name, query, reference, value, padding, sizes):
        """Equation 3 of Deformable DETR for one image. query: (n, dim). reference: (n, levels, 2 or 4)."""
        value = linear(self.w, f"{name}.value_proj", value)
        value[padding] = 0.0
        n, dim = query.shape
        offsets = linear(self.w, f"{name}.sampling_offsets", query)
        points = offsets.shape[1] // (HEADS * len(sizes) * 2)
        offsets = offsets.view(n, HEADS, len(sizes), points, 2)
        weights = torch.softmax(linear(self.w, f"{name}.attention_weights", query).view(n, HEADS, -1), -1)
        weights = weights.view(n, HEADS, len(sizes), points)
        heads = []
        for head in range(HEADS):
            part = value[:, head * dim // HEADS : (head + 1) * dim // HEADS]
            total, start = 0.0, 0
            for level, (height, width) in enumerate(sizes):
                image = part[start : start + height * width].T.reshape(1, -1, height, width)
                start += height * width
                at = reference[:, level, None, :2]
                if reference.shape[-1] == 2:
                    places = at + offsets[:, head, level] / torch.tensor([width, height])
                else:
                    places = at + offsets[:, head, level] / points * reference[:, level, None, 2:] / 2
                sample = F.grid_sample(image, places[None] * 2 - 1, align_corners=False)[0]  # (d, n, points)
                total = total + (sample * weights[:, head, level]).sum(-1).T
            heads.append(total)
        return linear(self.w, f"{name}.output_proj", torch.cat(heads, -1))

    def self_attention(self, name, x, position):
        weight, bias = self.w[f"{name}.in_proj_weight"].chunk(3), self.w[f"{name}.in_proj_bias"].chunk(3)
        q, k, v = (
            (x + position) @ weight[0].T + bias[0],
            (x + position) @ weight[1].T + bias[1],
            x @ weight[2].T + bias[2],
        )
        size = x.shape[1] // HEADS
        parts = []
        for head in range(HEADS):
            s = slice(head * size, (head + 1) * size)
            parts.append(torch.softmax(q[:, s] @ k[:, s].T / math.sqrt(size), -1) @ v[:, s])
        return linear(self.w, f"{name}.out_proj", torch.cat(parts, -1))

    def norm(self, name, x):
        return layer_norm(self.w, name, x)

    def ffn(self, name, x):
        first, second = self.n["ffn"]
        return linear(self.w, f"{name}.{second}", linear(self.w, f"{name}.{first}", x).clamp(min=0))

    def heads(self, index, x):
        """(class logits, box deltas) of a decoder layer's head; index -1 is the encoder's."""
        if self.layout == "dino":
            cls = f"class_embed.{index}" if index >= 0 else "transformer.enc_out_class_embed"
            box = f"bbox_embed.{index}" if index >= 0 else "transformer.enc_out_bbox_embed"
            layers = [f"{box}.layers.{i}" for i in range(3)]
        else:
            index = index if index >= 0 else self.count("decoder")
            cls, layers = (
                f"query_head.cls_branches.{index}",
                [f"query_head.reg_branches.{index}.{i}" for i in (0, 2, 4)],
            )
        y = x
        for i, layer in enumerate(layers):
            y = linear(self.w, layer, y)
            y = y.clamp(min=0) if i < 2 else y
        return linear(self.w, cls, x), y

    def count(self, part):
        i = 0
        while any(key.startswith(f"{self.n['root']}{part}.layers.{i}.") for key in self.w):
            i += 1
        return i

    def encode(self, maps, mask):
        """maps: (1, dim, h, w) a level, of one image. mask: (height, width), True = image."""
        dim = maps[0].shape[1]
        sizes = [tuple(x.shape[-2:]) for x in maps]
        tokens, positions, paddings, centres, boxes, ratios = [], [], [], [], [], []
        for level, (height, width) in enumerate(sizes):
            inside = F.interpolate(mask[None, None].float(), size=(height, width))[0, 0].bool()
            rows, columns = int(inside[:, 0].sum()), int(inside[0].sum())
            ratios.append([columns / width, rows / height])
            code = torch.zeros(height, width, dim)
            for y in range(height):
                for x in range(width):
                    # Cells are counted from 1 and stay at the last one in the padding.
                    up, left = min(y + 1, rows) if x < columns else 0, min(x + 1, columns) if y < rows else 0
                    code[y, x] = torch.cat(
                        [
                            angles(up, rows if x < columns else 0, dim),
                            angles(left, columns if y < rows else 0, dim),
                        ]
                    )
                    centres.append([(x + 0.5) / columns, (y + 0.5) / rows])
                    boxes.append([*centres[-1], 0.05 * 2**level, 0.05 * 2**level])
            positions.append(code.view(-1, dim) + self.w[self.n["level"]][level])
            tokens.append(maps[level][0].flatten(1).T)
            paddings.append(~inside.flatten())
        ratios, padding = torch.tensor(ratios), torch.cat(paddings)
        reference = torch.tensor(centres)[:, None] * ratios[None]
        x, position = torch.cat(tokens), torch.cat(positions)
        for i in range(self.count("encoder")):
            name = f"{self.n['root']}encoder.layers.{i}"
            first, second = self.n["enc_norms"]
            x = self.norm(
                f"{name}.{first}",
                x + self.attention(f"{name}.{self.n['enc_attn']}", x + position, reference, x, padding, sizes),
            )
            x = self.norm(f"{name}.{second}", x + self.ffn(name, x))
        boxes = torch.tensor(boxes)
        usable = (boxes > 0.01).all(-1) & (boxes < 0.99).all(-1) & ~padding
        return {
            "memory": x,
            "padding": padding,
            "sizes": sizes,
            "ratios": ratios,
            "boxes": boxes,
            "usable": usable,
        }

    def proposals(self, e):
        """Class logits (tokens, classes) and boxes (tokens, 4) of the encoder."""
        memory = e["memory"].clone()
        memory[~e["usable"]] = 0.0
        root = self.n["root"]
        classes, delta = self.heads(-1, self.norm(f"{root}enc_output_norm", linear(self.w, f"{root}enc_output", memory)))
        logit = torch.log(e["boxes"] / (1 - e["boxes"]))
        logit[~e["usable"]] = float("inf")
        return classes, torch.sigmoid(delta + logit)

    def decode(self, e, reference):
        """Final (logits, boxes) and lists of the normed states and of references, one a layer."""
        x = self.w[self.n["query"]].clone()
        states, references = [], []
        for i in range(self.count("decoder")):
            name = f"{self.n['root']}decoder.layers.{i}"
            first, second, third = self.n["dec_norms"]
            levels = reference[:, None] * torch.cat([e["ratios"], e["ratios"]], -1)[None]
            codes = [sine(levels[:, 0, side] * 2 * math.pi, x.shape[1] // 2) for side in (1, 0, 2, 3)]
            root = f"{self.n['root']}decoder."
            a, b = self.n["ref"]
            position = linear(self.w, f"{root}ref_point_head.{a}", torch.cat(codes, -1)).clamp(min=0)
            position = linear(self.w, f"{root}ref_point_head.{b}", position)
            x = self.norm(f"{name}.{first}", x + self.self_attention(f"{name}.{self.n['self_attn']}", x, position))
            y = self.attention(f"{name}.{self.n['cross_attn']}", x + position, levels, e["memory"], e["padding"], e["sizes"])
            x = self.norm(f"{name}.{second}", x + y)
            x = self.norm(f"{name}.{third}", x + self.ffn(name, x))
            before = reference
            reference = torch.sigmoid(self.heads(i, x)[1] + logit_of(before))
            states.append(self.norm(f"{root}norm", x))
            references.append(reference)
        classes, delta = self.heads(len(states) - 1, states[-1])
        return classes, torch.sigmoid(delta + logit_of(before)), states, references


def logit_of(x, eps=1e-3):
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


def sine(angle, size, temperature=10000.0):
    """(n,) angles -> (n, size): sine and cosine in turn, of falling frequency."""
    columns = []
    for i in range(size):
        wave = angle / temperature ** (2 * (i // 2) / size)
        columns.append(wave.sin() if i % 2 == 0 else wave.cos())
    return torch.stack(columns, -1)


def angles(place, count, dim):
    scaled = torch.tensor([place / (count + 1e-6) * 2 * math.pi])
    return sine(scaled, dim // 2, 20.0)[0]
