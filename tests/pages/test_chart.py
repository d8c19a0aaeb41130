"""Charts: what is drawn, thinned out, smoothed and labeled."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from armature.pages import chart

NS = "{http://www.w3.org/2000/svg}"


def parsed(drawn: chart.Chart) -> ET.Element:
    return ET.fromstring(chart.render(drawn))


def points(root: ET.Element) -> list[list[tuple[float, float]]]:
    found = [line.attrib["points"].split() for line in root.iter(f"{NS}polyline")]
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in found
    ]


def test_values_that_are_not_finite_interrupt_a_line():
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0]
    root = parsed(chart.Chart(title="x", lines=[chart.Line(xs=range(7), ys=ys)]))
    assert [len(line) for line in points(root)] == [2, 2]
    assert len([*root.iter(f"{NS}circle")]) == 1  # a value between two gaps


@pytest.mark.parametrize("ys", [[], [math.nan], [0.0, 0.0], [5.0]])
def test_any_values_make_a_valid_chart(ys):
    lines = [chart.Line(xs=range(len(ys)), ys=ys)]
    text = chart.render(chart.Chart(title="x", lines=lines))
    ET.fromstring(text)
    numbers = re.findall(r'(?:x1|y1|x|y|cx|cy|points)="([^"]*)"', text)
    assert not re.search("nan|inf", " ".join(numbers))
