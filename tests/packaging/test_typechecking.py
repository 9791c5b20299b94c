"""What the annotations of the package are checked by while it is tested."""

import jaxtyping
import numpy as np
import pytest
import typechecking
from jaxtyping import Float, TypeCheckError
from typechecking import checked

from rlexp.networks import normaliser

checking = jaxtyping.jaxtyped(typechecker=checked)
Rows = Float[np.ndarray, " N"]


def made(number: int, kind: type = int):
    """A function inside another, as an algorithm's `update` is."""

    @checking
    def add(x: kind) -> kind:
        return x + number

    return add


def test_each_function_that_is_made_does_its_own_and_is_checked():
    one, two = made(1), made(2)
    assert (one(1), two(1)) == (2, 3)
    for function in (one, two):
        with pytest.raises(TypeCheckError, match=r"parameters of .*add"):
            function("a")


def test_the_same_name_with_other_annotations_is_another_check():
    whole, text = made(1), made("b", str)  # type: ignore[arg-type]
    assert (whole(1), text("a")) == (2, "ab")
    with pytest.raises(TypeCheckError):
        text(1)
    with pytest.raises(TypeCheckError):
        whole("a")


def test_the_same_name_with_other_parameters_is_another_check():
    def of(optional: bool):
        if optional:

            @checking
            def f(x: int = 0) -> int:
                return x
        else:

            @checking
            def f(x: int) -> int:
                return x

        return f

    assert of(False)(1) == 1
    assert of(True)() == 0
    with pytest.raises(TypeError):
        of(False)()


def test_shapes_are_of_each_call():
    @checking
    def sums(x: Rows, y: Rows) -> Rows:
        return x + y

    for n in (2, 3):
        assert sums(np.zeros(n), np.zeros(n)).shape == (n,)
    with pytest.raises(TypeCheckError):
        sums(np.zeros(2), np.zeros(3))


def test_a_signature_is_made_into_a_check_once():
    made(1)
    before = len(typechecking._made)
    made(2)
    assert len(typechecking._made) == before


def test_the_package_is_checked_by_it():
    with pytest.raises(TypeCheckError):
        normaliser.update(normaliser.init({}), {}, np.zeros(3, np.float32))  # type: ignore[arg-type]
    assert any(module.startswith("rlexp.") for module, *_ in typechecking._made)
