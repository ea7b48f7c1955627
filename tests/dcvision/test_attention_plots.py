"""Attention figures: values and positions of the cells."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from dcmha import ComposeWeights
from dcmha.analysis import Recorded
from dcmha.impl.reference import AttentionMaps
from dctrain.errors import UserError
from dcvision.attention_plots import AttentionView, draw_attention, patch_grid, read_image

HEADS, PREFIX, GRID = 3, 1, (2, 4)
TOKENS = PREFIX + GRID[0] * GRID[1]


def make_recorded(has_pre: bool = True, has_post: bool = True) -> Recorded:
    maps = [torch.randn(1, HEADS, TOKENS, TOKENS) for _ in range(5)]
    pre, post = (ComposeWeights(base=torch.randn(1, HEADS, HEADS)) if has else None for has in (has_pre, has_post))
    return Recorded(AttentionMaps(*maps[:4]), maps[4], pre, post, 1)


def drawn(axes) -> np.ndarray:
    return np.asarray(axes.images[0].get_array())


def cells(figure, columns: int) -> list[list]:
    """Return the axes of the figure, row by row, without the color bar."""
    axes = [cell for cell in figure.axes if cell.get_label() != "<colorbar>"]
    return [axes[start : start + columns] for start in range(0, len(axes), columns)]


@pytest.mark.parametrize(("has_pre", "has_post"), [(True, True), (True, False), (False, True), (False, False)])
def test_figure_rows_match_attention_maps_of_query(has_pre, has_post):
    one, query = make_recorded(has_pre, has_post), 6
    pixels = torch.randint(255, (3, 32, 32), dtype=torch.uint8)
    figures = draw_attention({"blocks.0.attn": one}, AttentionView(pixels, GRID, PREFIX, query))
    rows = {"uncomposed": one.uncomposed_weights}
    rows |= {"pre-composed": one.maps.weights} if has_pre else {}
    rows |= {"post-composed": one.maps.composed_weights} if has_post else {}
    lines = cells(figures["blocks.0.attn"], HEADS + 1)
    assert [line[0].get_title() for line in lines] == list(rows)
    for line, maps in zip(lines, rows.values(), strict=True):
        assert np.array_equal(drawn(line[0]), pixels.permute(1, 2, 0).numpy())
        assert np.concatenate(line[0].lines[0].get_xydata()).tolist() == [2.5 * 8 - 0.5, 1.5 * 16 - 0.5]
        for head, cell in enumerate(line[1:]):
            expected = maps[0, head, PREFIX + query, PREFIX:].view(GRID)
            assert np.array_equal(drawn(cell), expected.numpy()) and cell.get_aspect() == 2.0
    assert ("compositions" in figures) == (has_pre or has_post)


def test_composition_figure_subtracts_identity():
    recorded = {"a": make_recorded(), "b": make_recorded(has_post=False)}
    figure = draw_attention(recorded, AttentionView(torch.zeros(3, 8, 8, dtype=torch.uint8), GRID, PREFIX, None))[
        "compositions"
    ]
    pre, post = cells(figure, 2)
    for cell, one in zip(pre, recorded.values(), strict=True):
        assert np.array_equal(drawn(cell), (one.pre_composition - torch.eye(HEADS)).numpy())
    assert np.array_equal(drawn(post[0]), (recorded["a"].post_composition - torch.eye(HEADS)).numpy())
    assert not post[1].images and not post[1].axison


def test_windowed_attention_and_out_of_range_queries_raise_error():
    pixels = torch.zeros(3, 8, 8, dtype=torch.uint8)
    one = make_recorded()
    for grid, query, message in (
        ((3, 3), None, "attends within 1 x 9 tokens; expected layers that attend to all 3 x 3 patches and 1 prefix"),
        (GRID, 8, "query=8; expected 0 to 7 for 2 x 4 patches"),
        (GRID, -1, "query=-1; expected"),
    ):
        with pytest.raises(UserError, match=message):
            draw_attention({"a": one}, AttentionView(pixels, grid, PREFIX, query))
    windows = AttentionMaps(*(torch.cat([maps] * 4) for maps in one.maps))
    with pytest.raises(UserError, match="attends within 4 x 9 tokens"):
        AttentionView(pixels, GRID, PREFIX, None).check({"a": Recorded(windows, one.uncomposed_weights, None, None, 1)})


@pytest.mark.parametrize(
    ("name", "options", "grid"),
    [
        ("vit_tiny_patch16_224", {"patch_size": (8, 32)}, (28, 7)),
        ("dcvit_digits_patch2_8", {"img_size": 224}, (112, 112)),
        ("naflexvit_base_patch16_gap", {}, (14, 14)),
    ],
)
def test_patch_grid_matches_model(name, options, grid):
    assert patch_grid(timm.create_model(name, depth=1, **options), 224) == grid
    with pytest.raises(UserError, match="ResNet has no patches"):
        patch_grid(timm.create_model("resnet18"), 224)


def test_read_image_converts_formats_to_8_bit_square(tmp_path):
    """16-bit, animated and BMP images are converted to 8 bits and cropped to a square."""
    ramp = np.linspace(0, 65535, 12 * 20).reshape(12, 20).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    frames = [Image.new("RGB", (20, 12), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "plain.bmp")
    deep, moving, plain = (read_image(str(tmp_path / name), 12) for name in ("deep.png", "moving.gif", "plain.bmp"))
    for image in (deep, moving, plain):
        assert image.shape == (3, 12, 12) and image.dtype == torch.uint8
    assert torch.equal(deep[0], torch.from_numpy(ramp[:, 4:16] >> 8).to(torch.uint8))
    assert moving[0].min() > 240 and moving[2].max() < 15
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.fromarray(ramp).save(tmp_path / "deep.tiff")
    for name in ("broken.png", "none.png", "deep.tiff"):
        with pytest.raises(UserError, match=f"cannot read the image .*{name}"):
            read_image(str(tmp_path / name), 12)
