from gateway.host.latest import Latest


def test_the_key_that_was_not_set_for_longest_is_forgotten() -> None:
    latest = Latest[str, int](2)
    latest["a"], latest["b"], latest["a"], latest["c"] = 1, 2, 3, 4
    assert list(latest.items()) == [("a", 3), ("c", 4)]
    assert latest.get("b") is None
