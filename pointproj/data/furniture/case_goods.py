"""Tables, desks, dressers and night stands."""

from itertools import pairwise, product

import numpy as np

from pointproj.data.furniture.outlines import SIDES, about, beside, circle, limits, rectangle, superellipse
from pointproj.data.furniture.parts import HANDLES, LEGS, Parts, Rng, drawer_fronts, four_legs, support
from pointproj.data.furniture.solids import bar, box, rod, rounded_box, slab, turned


def table(rng: Rng) -> Parts:
    """Table: round, oval or rectangular top on legs, a pedestal, trestles or panels."""
    height = rng.uniform(0.4, 0.8)
    shape = rng.pick("rectangle", "rectangle", "rounded", "round", "oval")
    half_x = rng.uniform(0.45, 0.95)
    half_y = half_x if shape == "round" else rng.uniform(0.35, min(0.6, half_x))
    thickness = rng.uniform(0.045, 0.07) * 2 * half_x
    radius = rng.uniform(0.03, 0.05)
    if shape in ("round", "oval"):
        outline = superellipse(half_x, half_y, rng.uniform(2.0, 2.6))
    else:
        outline = rectangle(half_x, half_y, 0.15 if shape == "rounded" else 0.0)
    under = height - thickness
    yield slab(outline, (under, height))
    inset = 0.6 if shape in ("round", "oval") else 0.86
    x, y = inset * half_x, inset * half_y
    kind = rng.pick("legs", "legs", "legs", "pedestal", "trestle", "panels")
    if kind == "legs":
        yield from _legs(rng, x, y, under, radius, half_y)
    elif kind == "pedestal":
        yield from _pedestal(rng, min(half_x, half_y), under)
    elif kind == "trestle":
        yield from _trestles(rng, x, y, under, radius)
    else:
        yield from [box(about(side * x, radius), y, (0.0, under + 0.01)) for side in SIDES]
        shelf = rng.uniform(0.2, 0.5) * height
        yield box(x, 0.9 * y, (shelf, shelf + 1.5 * radius))


def _legs(rng: Rng, x: float, y: float, under: float, radius: float, half_y: float) -> Parts:
    style = rng.pick(*LEGS)
    splay = rng.uniform(0.0, 0.15) * half_y if rng.chance(0.4) else 0.0
    yield from four_legs(x, y, under + 0.01, radius, style, splay)
    if rng.chance(0.5):
        low = under - rng.uniform(0.06, 0.12)
        yield box(x, y, (low, under + 0.01)) - box(x - radius, y - radius, (low - 1, under + 1))
    if rng.chance(0.35) and splay == 0.0:
        level = rng.uniform(0.15, 0.4) * under
        if rng.chance(0.5):
            yield box(x, y, (level, level + radius))
        else:
            yield from [bar(side * x, limits(y), level, 0.6 * radius, 4) for side in SIDES]
            yield bar(limits(x), 0, level, 0.6 * radius, 4)


def _pedestal(rng: Rng, extent: float, under: float) -> Parts:
    column = rng.uniform(0.05, 0.09)
    if rng.chance(0.5):
        foot = rng.uniform(0.5, 0.75) * extent
        stem = [(column, 0.3 * under), (column, 0.8 * under), (2.2 * column, under + 0.01)]
        yield turned([(foot, 0.0), (foot, 0.035), (1.6 * column, 0.08), *stem])
        return
    arms = rng.integers(3, 5)
    yield bar(0, 0, (0.08, under + 0.01), column)
    for tip in 0.8 * extent * circle(arms, 0.5):
        yield rod((0, 0, 0.16), (*tip, 0.035), 0.045, 0.035, sides=12)
        yield rod((0, 0, under - 0.1), (*(0.7 * tip), under + 0.01), 0.04, 0.03, sides=12)


def _trestles(rng: Rng, x: float, y: float, under: float, radius: float) -> Parts:
    crossed = rng.chance(0.5)
    for at in (-x, x):
        yield box(about(at, radius), y, (under - 2 * radius, under + 0.01))
        if crossed:
            ends = [(lean * y, -0.8 * lean * y) for lean in SIDES]
            yield from [bar(at, end, (0.0, under), radius, 4) for end in ends]
        else:
            yield box(about(at, radius), y, (0.0, 2 * radius))
            yield bar(at, 0, (0.01, under), 1.6 * radius, 4)
    yield bar(limits(x), 0, 0.45 * under, 1.2 * radius, 4)


def varied_table(rng: Rng) -> Parts:
    """Table of any size: thin or thick top of any outline, on any support, with a tier or benches."""
    half_x, share, height, thickness = rng.uniforms((0.25, 1.0), (0.4, 1.0), (0.3, 1.1), (0.008, 0.06))
    half_y = share * half_x
    exponent = float(rng.choice([2.0, 3.0, 6.0]))
    kind = rng.pick("rectangle", "rectangle", "rounded", "oval", "polygon")
    if kind == "oval":
        outline = superellipse(half_x, half_y, exponent)
    elif kind == "polygon":
        outline = superellipse(half_x, half_y, 2.0, rng.integers(5, 9))
    else:
        outline = rectangle(half_x, half_y, rng.uniform(0.02, 0.2) if kind == "rounded" else 0.0)
    under = height - thickness
    extent = 0.75 if kind in ("oval", "polygon") else 1.0
    yield slab(outline, (under, height))
    yield from support(rng, extent * half_x, extent * half_y, under)
    if rng.chance(0.15):  # a second, lower top of the same outline
        level, size = rng.uniform(0.2, 0.7) * height, rng.uniform(0.6, 1.0)
        yield slab(size * outline, (level, level + thickness))
    if rng.chance(0.12):  # benches along it, as for a picnic
        bench = rng.uniform(0.4, 0.6) * height
        for y in (side * (half_y + 0.25) for side in SIDES):
            yield box(half_x, about(y, 0.1), (bench - 0.03, bench))
            for x in (0.7 * end * half_x for end in SIDES):
                yield bar(x, y, (0.0, bench - 0.02), 0.02, 4)
                yield bar(x, (y, 0), 0.05, 0.02, 4)


def desk(rng: Rng) -> Parts:
    """Desk: a top on drawer pedestals, panels or legs, with hutch, side return or modesty panel."""
    height, half_x, half_y = rng.uniforms((0.68, 0.8), (0.55, 0.9), (0.28, 0.42))
    under = height - rng.uniform(0.05, 0.075)
    yield box(half_x, half_y, (under, height))
    inner_x, inner_y = half_x - 0.03, half_y - 0.03
    left, right = rng.pick("drawers", "drawers", "panel", "legs"), rng.pick("drawers", "panel", "legs")
    if left == right == "legs" and rng.chance(0.5):
        left = "drawers"
    for kind, side in ((left, -1), (right, 1)):
        yield from _desk_end(rng, kind, side, inner_x, inner_y, under)
    panel = rng.uniform(0.25, 0.9) * under
    yield box(inner_x, (inner_y - 0.04, inner_y), (under - panel, under + 0.01))
    if rng.chance(0.35):  # a hutch
        rise, depth, board = rng.uniform(0.3, 0.6), rng.uniform(0.2, 0.3), 0.045
        y, z = (half_y - depth, half_y), (height - 0.01, height + rise)
        yield box(half_x, (half_y - board, half_y), z)
        yield box(half_x, y, (z[1] - board, z[1]))
        walls = np.linspace(-half_x + board / 2, half_x - board / 2, rng.integers(2, 5))
        yield from [box(about(wall, board / 2), y, z) for wall in walls]
        if rng.chance(0.5):
            level = height + 0.5 * rise
            yield box(half_x, y, (level, level + board))
    if rng.chance(0.3):  # a return, at a right angle
        x, front = beside(rng.side(), half_x, half_x - 0.45), -half_y - rng.uniform(0.4, 0.8)
        yield box(x, (front, -half_y + 0.01), (under, height))
        yield box((x[0] + 0.03, x[1] - 0.03), (front + 0.03, front + 0.08), (0.0, under + 0.01))
    elif rng.chance(0.3):
        tray = under - 0.12
        yield box(0.3, (-half_y - 0.05, 0.0), (tray, tray + 0.04))
        yield from [box(about(side * 0.29, 0.02), (-0.1, 0.0), (tray, under + 0.01)) for side in SIDES]


def _desk_end(rng: Rng, kind: str, side: int, x: float, y: float, under: float) -> Parts:
    if kind == "panel":
        yield box(beside(side, x, x - 0.06), y, (0.0, under + 0.01))
        return
    if kind == "legs":
        yield from [bar(side * (x - 0.03), end * (y - 0.03), (0.0, under + 0.01), 0.03, 4) for end in SIDES]
        return
    across = beside(side, x, x - rng.uniform(0.32, 0.45))
    bottom = rng.uniform(0.04, 0.3) if rng.chance(0.4) else 0.0
    yield box(across, y, (bottom, under + 0.01))
    if bottom:
        places = [(at, end * (y - 0.03)) for at in (across[0] + 0.03, across[1] - 0.03) for end in SIDES]
        yield from [bar(*place, (0.0, bottom + 0.01), 0.025, 4) for place in places]
    rows, style = rng.uniform(0.7, 1.3, rng.integers(2, 5)), rng.pick(*HANDLES)
    yield from drawer_fronts(across, (bottom + 0.02, under - 0.01), -y, style, rows)


def varied_desk(rng: Rng) -> Parts:
    """Desk of any size: thin top on any support, with pedestals, returns, tiers of shelves or a tray."""
    half_x, half_y, height, board = rng.uniforms((0.45, 1.0), (0.25, 0.5), (0.6, 0.95), (0.01, 0.05))
    under = height - board
    yield box(half_x, half_y, (under, height))
    yield from support(rng, half_x, half_y, under, "legs", "panels", "panels", "frames", "hairpin", "crossed")
    for side in SIDES:
        if rng.chance(0.4):
            width = rng.uniform(0.3, 0.6) * half_x
            x, front = beside(side, half_x - 0.02, half_x - 0.02 - width), half_y - 0.02
            low = rng.uniform(0.0, 0.7) * under
            yield box(x, front, (low, under + 0.004))
            if rng.chance(0.6):
                rows, style = rng.uniform(0.7, 1.3, rng.integers(1, 4)), rng.pick(*HANDLES)
                yield from drawer_fronts(x, (low, under), -front, style, rows)
    if rng.chance(0.35):  # a return, at a right angle, with its own support
        side, deep, wide = rng.side(), rng.uniform(0.4, 1.0), rng.uniform(0.3, 0.5)
        x = beside(side, half_x, half_x - wide)
        yield box(x, (-half_y - deep, -half_y + 0.02), (under, height))
        base = support(rng, wide / 2, deep / 2, under, "legs", "panels", "plinth")
        yield from [part.translate([sum(x) / 2, -half_y - deep / 2, 0.0]) for part in base]
    if rng.chance(0.4):  # shelves above the top, on uprights
        tiers, rise, depth = rng.integers(1, 4), rng.uniform(0.15, 0.35), rng.uniform(0.3, 1.0) * half_y
        extent, y = half_x * rng.uniform(0.4, 1.0), (half_y - depth, half_y)
        levels = [height + tier * rise for tier in range(1, tiers + 1)]
        yield from [box(extent, y, (level - board, level)) for level in levels]
        z = (height - 0.004, levels[-1])
        yield from [box(about(side * (extent - board), board / 2), y, z) for side in SIDES]
        if rng.chance(0.5):
            yield box(extent, (half_y - board, half_y), z)
    if rng.chance(0.3):  # a keyboard tray on hangers
        tray, wide = under - rng.uniform(0.06, 0.15), 0.5 * half_x
        yield box(wide, (-half_y - 0.1, 0.0), (tray, tray + 0.012))
        hangers = [about(side * 0.9 * wide, 0.01) for side in SIDES]
        yield from [box(x, (-0.2 * half_y, 0.0), (tray, under + 0.004)) for x in hangers]


def dresser(rng: Rng) -> Parts:
    """Chest of drawers on feet or a plinth, sometimes with doors or a mirror."""
    wide = rng.chance(0.6)
    half_x = rng.uniform(0.55, 0.85) if wide else rng.uniform(0.3, 0.5)
    height = rng.uniform(0.7, 0.95) if wide else rng.uniform(0.95, 1.4)
    half_y, bottom = rng.uniform(0.2, 0.28), rng.uniform(0.06, 0.18)
    yield box(half_x, half_y, (bottom, height))
    yield from _stand(rng, half_x, half_y, bottom)
    if rng.chance(0.7):
        over = rng.uniform(0.015, 0.04)
        outline = rectangle(half_x + over, (-half_y - over, half_y + over / 2), over)
        yield slab(outline, (height - 0.01, height + rng.uniform(0.03, 0.05)))
    columns = rng.integers(2, 4) if wide else rng.integers(1, 3)
    rows = rng.uniform(0.8, 1.3, int(rng.integers(3, 5) if wide else rng.integers(4, 7)))
    style = rng.pick(*HANDLES[:3])
    inner, z = half_x - 0.02, (bottom + 0.02, height - 0.02)
    if wide and rng.chance(0.25):
        third = inner / 3
        for x, drawers in (((-inner, -third), rows), ((third, inner), rows), ((-third, third), [1.0])):
            yield from drawer_fronts(x, z, -half_y, style, drawers)
    else:
        for x in pairwise(np.linspace(-inner, inner, columns + 1)):
            yield from drawer_fronts(x, z, -half_y, style, rows)
    if rng.chance(0.3):
        yield from _mirror(rng, half_x, half_y, height)


def night_stand(rng: Rng) -> Parts:
    """Small cabinet with one to three drawers, an open shelf or a round body."""
    if rng.chance(0.15):
        yield from _round_night_stand(rng)
        return
    half_x, half_y, height, bottom = rng.uniforms((0.2, 0.3), (0.17, 0.25), (0.45, 0.7), (0.04, 0.28))
    yield from _stand(rng, half_x, half_y, bottom)
    style, inner, board = rng.pick(*HANDLES), limits(half_x - 0.015), 0.04
    layout = rng.pick("drawers", "drawers", "shelf_below", "shelf_above", "open")
    body = box(half_x, half_y, (bottom, height))
    if layout == "drawers":
        rows = rng.uniform(0.8, 1.2, rng.integers(1, 4))
        yield body
        yield from drawer_fronts(inner, (bottom + 0.015, height - 0.015), -half_y, style, rows)
    else:
        share = (1.0 if layout == "open" else rng.uniform(0.4, 0.6)) * (height - bottom)
        low, high = (height - share, height) if layout == "shelf_above" else (bottom, bottom + share)
        yield body - box(half_x - board, (-half_y - 1, half_y - board), (low + board, high - board))
        if layout == "open":
            yield box(half_x, half_y, about(0.5 * (bottom + height), board / 2))
        else:
            shut = (high + 0.01, height - 0.01) if layout == "shelf_below" else (bottom + 0.01, low - 0.01)
            yield from drawer_fronts(inner, shut, -half_y, style)
    if rng.chance(0.6):
        over = rng.uniform(0.01, 0.03)
        outline = rectangle(half_x + over, (-half_y - over, half_y), over)
        yield slab(outline, (height - 0.01, height + 0.03))


def _round_night_stand(rng: Rng) -> Parts:
    half, height, bottom = rng.uniforms((0.2, 0.28), (0.45, 0.65), (0.05, 0.2))
    body = slab(superellipse(half, half, rng.uniform(2.0, 3.0)), (bottom, height))
    top = slab(superellipse(half + 0.02, half + 0.02, 2.2), (height - 0.01, height + 0.035))
    legs = four_legs(0.6 * half, 0.6 * half, bottom + 0.02, 0.025, rng.pick(*LEGS[:3]))
    # Grooves around the body tell the drawers apart.
    for level in np.linspace(bottom, height, rng.integers(3, 5))[1:-1]:
        ring = slab(superellipse(half + 0.1, half + 0.1), about(level, 0.008))
        body -= ring - slab(superellipse(half - 0.012, half - 0.012), about(level, 1))
    middles = [0.5 * (low + high) for low, high in pairwise(np.linspace(bottom, height, 3))]
    y = (-half - 0.03, -half + 0.04)
    return [body, top, *legs, *(rounded_box(0.05, y, about(middle, 0.012), 0.01) for middle in middles)]


def _stand(rng: Rng, half_x: float, half_y: float, bottom: float) -> Parts:
    kind = rng.pick("legs", "legs", "plinth", "bracket")
    if kind == "legs" or bottom > 0.12:
        return four_legs(half_x - 0.045, half_y - 0.045, bottom + 0.02, 0.035, rng.pick(*LEGS))
    if kind == "plinth":
        return [box(half_x - 0.03, (-half_y + 0.04, half_y - 0.01), (0.0, bottom + 0.01))]
    gap = (-1.0, bottom - 0.02)
    solid = box(half_x, half_y, (0.0, bottom + 0.01))
    return [solid - box(half_x - 0.1, half_y + 1, gap) - box(half_x + 1, half_y - 0.08, gap)]


def _mirror(rng: Rng, half_x: float, half_y: float, height: float) -> Parts:
    wide, rise = rng.uniform(0.5, 0.9) * half_x, rng.uniform(0.45, 0.8)
    centre = height + 0.1 + rise / 2
    exponent = 2.2 if rng.chance(0.4) else 9.0
    upright = [[1, 0, 0, 0], [0, 0, -1, half_y - 0.02], [0, 1, 0, centre]]
    frame = slab(superellipse(wide, rise / 2, exponent), (-0.02, 0.05)).transform(upright)
    glass = slab(superellipse(wide - 0.05, rise / 2 - 0.05, exponent), (0.03, 0.2)).transform(upright)
    z = (height - 0.02, centre)
    posts = [bar(side * 0.6 * wide, half_y - 0.03, z, 0.025, 4) for side in SIDES]
    return [part - glass for part in (frame, *posts)]


def varied_dresser(rng: Rng) -> Parts:
    """Wardrobe, chest, shelf or sideboard of any size."""
    half_x, half_y, height = rng.uniform(0.25, 0.9), rng.uniform(0.15, 0.35), rng.uniform(0.6, 2.0)
    yield from _cabinet(rng, half_x, half_y, height, hollow=rng.chance(0.4))
    if rng.chance(0.2):
        yield from _mirror(rng, half_x, half_y, height)
    if rng.chance(0.2):  # a narrower cabinet on top
        x, y = half_x * rng.uniform(0.6, 0.98), half_y * rng.uniform(0.4, 0.9)
        upper = _cabinet(rng, x, y, rng.uniform(0.3, 0.8), hollow=False)
        yield from [part.translate([0.0, 0.02, height - 0.002]) for part in upper]


def varied_night_stand(rng: Rng) -> Parts:
    """Small cabinet or table of any size."""
    half_x, half_y, height = rng.uniform(0.15, 0.35), rng.uniform(0.15, 0.3), rng.uniform(0.35, 0.8)
    if rng.chance(0.6):
        yield from _cabinet(rng, half_x, half_y, height, hollow=rng.chance(0.4))
        return
    board = rng.uniform(0.01, 0.04)
    low = height - rng.uniform(0.1, 0.6) * height
    x, y = 0.9 * half_x, 0.9 * half_y
    yield from [box(half_x, half_y, (height - board, height)), box(x, y, (low, height - 0.5 * board))]
    if rng.chance(0.7):
        rows, style = [1.0] * int(rng.integers(1, 4)), rng.pick(*HANDLES)
        yield from drawer_fronts(limits(x), (low, height - board), -y, style, rows)
    yield from support(rng, x, y, low, "legs", "frames", "crossed", "column", "panels", "hairpin")


def _cabinet(rng: Rng, half_x: float, half_y: float, height: float, *, hollow: bool) -> Parts:
    """Carcass, or hollow body of thin boards, on any low support or the floor."""
    clear = rng.uniform(0.03, 0.3) * height if rng.chance(0.6) else 0.0
    yield from (_boarded if hollow else _carcass)(rng, half_x, half_y, clear, height)
    if clear:
        yield from support(rng, half_x, half_y, clear, "legs", "plinth", "panels", "frames", "crossed")


def _carcass(rng: Rng, half_x: float, half_y: float, clear: float, height: float) -> Parts:
    """Block with a grid of closed, open and drawer compartments."""
    board = rng.uniform(0.008, 0.04)
    columns, rows = rng.integers(1, 4), rng.integers(1, 7)
    edges_x = np.linspace(-half_x + board, half_x - board, columns + 1)
    edges_z = np.linspace(clear + board, height - board, rows + 1)
    carcass, fronts = box(half_x, half_y, (clear, height)), []
    openness = float(rng.choice([0.0, 0.0, 0.3, 1.0]))
    backless, style, gap = rng.chance(0.15), rng.pick(*HANDLES), rng.uniform(0.003, 0.014)
    rear, half = half_y + 1.0 if backless else half_y - board, board / 2
    for x, z in product(pairwise(edges_x), pairwise(edges_z)):
        if rng.chance(openness):
            carcass -= box((x[0] + half, x[1] - half), (-half_y - 1, rear), (z[0] + half, z[1] - half))
        elif rng.chance(0.8):
            fronts += drawer_fronts(x, z, -half_y, style, gap=gap)
    yield carcass
    yield from fronts
    if rng.chance(0.4):
        over, top = rng.uniform(0.005, 0.05), rng.uniform(0.01, 0.05)
        yield box(half_x + over, (-half_y - over, half_y), (height - 0.003, height + top))


def _boarded(rng: Rng, half_x: float, half_y: float, clear: float, height: float) -> Parts:
    """Thin boards around compartments, which are open, shut by doors (solid then), or hold drawers."""
    board = rng.uniform(0.006, 0.03)
    edges_x = np.linspace(-half_x + board / 2, half_x - board / 2, rng.integers(2, 5))
    edges_z = np.linspace(clear + board / 2, height - board / 2, rng.integers(2, 7))
    yield from [box(about(x, board / 2), half_y, (clear, height)) for x in edges_x]
    yield from [box(half_x, half_y, about(z, board / 2)) for z in edges_z]
    if rng.chance(0.85):
        yield box(half_x, (half_y - board, half_y), (clear, height))
    door = (-half_y - board, -half_y + 0.002)  # overlaps with the boards around it
    usual, other = (rng.pick("open", "door", "drawer", "pulled") for _ in range(2))
    for x, z in product(pairwise(edges_x), pairwise(edges_z)):
        kind = usual if rng.chance(0.7) else other
        if kind == "door":
            yield box(x, door, z)
        elif kind != "open":
            out = rng.uniform(0.1, 0.9) * 2 * half_y if kind == "pulled" else 0.0
            left, right = x[0] + 1.5 * board, x[1] - 1.5 * board
            low, rear, tall = z[0] + board, half_y - 3 * board, (z[0] + board, z[0] + 0.8 * (z[1] - z[0]))
            drawer = (  # a front, and behind it a box that is open above
                box(x, door, z),
                box((left, right), (-half_y, rear), (low, low + board)),
                box((left, left + board), (-half_y, rear), tall),
                box((right - board, right), (-half_y, rear), tall),
                box((left, right), (rear - board, rear), tall),
            )
            yield from [part.translate([0.0, -out, 0.0]) for part in drawer]
