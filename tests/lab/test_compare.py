"""The interval of a paired difference."""

import pytest

from openk3.lab.compare import paired, student_t


@pytest.mark.parametrize("degrees, expected", [(1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (100, 1.98397)])
def test_students_quantile_is_the_tables(degrees, expected):
    assert student_t(0.95, degrees) == pytest.approx(expected, rel=1e-5)


def test_a_paired_difference_has_its_interval():
    found = paired([1.5, 1.6, 1.7], [1.4, 1.5, 1.5])
    assert found["mean"] == pytest.approx(0.4 / 3)
    assert found["half_width"] == pytest.approx(4.30265 * 0.057735 / 3**0.5, rel=1e-4)
    assert paired([1.0], [2.0])["half_width"] is None
