"""The door: what a page may ask, and everything else."""

import json

import pytest

from bayesadam.play.server import MOST_POINTS, SLIDERS, UNITS, describe, examples, parse


def body(**changes):
    return json.dumps({"page": "a1", "points": [[0, 0.5]], **changes}).encode()


def test_a_request_with_nothing_but_points_stands_at_the_defaults():
    request = parse(body())
    assert request.points == ((0.0, 0.5),)
    assert {s.name: getattr(request, s.name) for s in SLIDERS} == {s.name: s.default for s in SLIDERS}
    assert (request.units, request.restart) == (UNITS[0], False)


@pytest.mark.parametrize("slider", SLIDERS, ids=lambda s: s.name)
def test_both_ends_of_a_slider_are_accepted_and_nothing_beyond(slider):
    for value in (slider.low, slider.high):
        assert getattr(parse(body(**{slider.name: value})), slider.name) == value
    for value in (slider.low / 2 - 0.1, slider.high * 2, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=slider.name):
            parse(body(**{slider.name: value}))


def test_points_are_counted():
    assert len(parse(body(points=[[0, 0]] * MOST_POINTS)).points) == MOST_POINTS
    with pytest.raises(ValueError, match=f"at most {MOST_POINTS}"):
        parse(body(points=[[0, 0]] * (MOST_POINTS + 1)))


def test_the_examples_are_requests_that_pass():
    for points in examples().values():
        assert len(parse(body(points=points)).points) == len(points)


def test_what_the_page_is_told_is_json():
    assert json.loads(json.dumps(describe()))["most_points"] == MOST_POINTS
