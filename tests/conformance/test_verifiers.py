"""Verifier rows of the cases, each under its id, with more of each kind; code is in test_verifiers_of_code.py."""

import time

import pytest

from milkweed.environments import exact, last_box, math_equal, mathematical, multiple_choice, numeric


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {a_{b_{c}}} and more }", "a_{b_{c}}"),
        (r"\boxed{\sqrt{\frac{a}{b}}} \text{done}", r"\sqrt{\frac{a}{b}}"),
        (r"\boxed{never closed", None),
        ("no box", None),
        (r"\boxed 7", "7"),
    ],
)
def test_R1_boxes_end_at_their_own_brace(text, inside):
    assert last_box(text) == inside


def test_R1_the_last_complete_box_wins():
    assert last_box(r"\boxed{1} then \boxed{2}") == "2"
    assert last_box(r"\boxed{3} wait \boxed{\frac{1}{2") == "3"
    assert last_box(r"\boxed{\boxed{3}}") == "3"
    assert last_box(r"\boxed{x = \boxed{3}}") == "x = 3"


def test_R3_the_score_is_of_the_whole_answer():
    for verify in (mathematical, numeric, exact):
        assert [verify(t, "1") for t in ("137", "1", "31", "1.5")] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("nothing", [None, "", "  \n", r"\boxed{}", r"\boxed{", "$$", "\\", "\x00", "no idea", "\ud800"])
def test_R3_nothing_said_is_worth_nothing_and_no_error(nothing):
    assert [v(nothing, "5") for v in (exact, numeric, mathematical)] == [0.0] * 3
    assert multiple_choice(nothing, "A") == 0.0 and not math_equal(nothing, "5")


def test_R3_a_prompt_without_an_answer_is_refused():
    for verify in (exact, numeric, mathematical, multiple_choice):
        with pytest.raises(ValueError, match="None"):
            verify("None", None)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>is it \\boxed{41}?</think> \\boxed{42}", 1),
        ("<think>it is \\boxed{42}</think> I do not know", 0),
        ("maybe 41, \\boxed{41} <answer>42</answer>", 1),
        ("<answer>41</answer> no: <answer> \\boxed{42} </answer>", 1),
        ("#### 42", 1),
        ("The answer is not 41. It is 42.", 1),
        ("The answer is 42, not 41.", 1),
    ],
)
def test_R6_what_is_said_after_thinking_and_within_answer_tags_counts(text, right):
    assert mathematical(text, "42") == right


def test_R4_box_on_either_side_only():
    assert mathematical(r"so \boxed{5}", "5") == mathematical("5", r"\boxed{5}") == 1.0
    assert mathematical(r"\boxed{5}", r"$\boxed{5}$") == 1.0


@pytest.mark.parametrize("text", [r"\fbox{42}", r"\framebox{42}", r"\(\boxed{42}\)", r"$$\boxed{ 42 }$$"])
def test_R5_other_boxes(text):
    assert mathematical(text, "42") == numeric(text, 42) == 1.0


def test_R6_a_box_counts_however_far_from_the_end():
    long = "+".join(str(i) for i in range(60))
    assert mathematical(rf"\boxed{{{long}}}" + " and so on" * 200, "1770") == 1.0
    assert mathematical("x" * 5000 + r"\boxed{5}" + "y" * 5000, "5") == 1.0


@pytest.mark.parametrize("text", [r"\boxed{\text{E}}", r"\boxed{\textbf{(E)}}", r"\boxed{\mathrm{E}.}", r"\boxed{E}"])
def test_R7_letters_in_text_commands(text):
    assert mathematical(text, "E") == multiple_choice(text, "E") == 1.0
    assert mathematical(text, "D") == multiple_choice(text, "D") == 0.0


@pytest.mark.parametrize("text", [r"\text{13}", r"\mathrm{13}", r"\text{ 13 }", r"\mathbf{13}", r"\textbf{13}"])
def test_R9_numbers_in_text_commands(text):
    assert math_equal(text, "13") and math_equal("13", text) and not math_equal(text, "31")


@pytest.mark.parametrize("text", ["**73**", "so it is **73**.", "__73__", "**Answer:** 73", "The answer is **73**."])
def test_R11_bold(text):
    assert mathematical(text, "73") == numeric(text, 73) == 1.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        ("1/2004!", "1/2006!"),
        ("10^{-8}", "10^{-9}"),
        ("e^{-1000}", "e^{-1001}"),
        ("0.00000001", "0.00000002"),
        (r"\pm 2021", "2021"),
        ("2021", r"\pm 2021"),
        ("-2021", "2021"),
        ("n=2,3,4", "1,2,3"),
        ("1,2", "1,2,3"),
        (r"\{1,2\}", "(1,2)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("x=5", "y=5"),
        ("|x|", "x"),
        ("3.14", r"\pi"),
        ("0.33", "1/3"),
        ("12", "1 2"),
        ("5 cm", "5 m"),
        ("5 apples", "5 pears"),
        ("1/0", "2/0"),
        ("1e-10", "1e-11"),
        ("e^{-100}", "0"),
        ("2/3", "0.67"),
        ("i", "-i"),
        ("x>3", r"x\ge 3"),
        (r"(-\infty,3)", r"(-\infty,3]"),
        (r"(1,2)\cup(3,4)", "(1,4)"),
        ("a=1, b=2", "a=2, b=1"),
        ("ABC", "CAB"),
        ("5, 6", "5"),
        ("$5$ and $6$", "5"),
        ("9^9^9^9", "9"),
        ("", ""),
        ("2^{100}", "2^{100}+1"),
        ("100!", "100!+1"),
        ("10^{50}", "10^{50}+1"),
        ("123456789012345678901234567890", "123456789012345678901234567891"),
        (r"\sqrt{2}\cdot 10^{30}", r"\sqrt{2}\cdot 10^{30}+1"),
        ("1010_2", "1010"),
        ("12_2", "12"),
        ("5%", "$5"),
        ("$5", "€5"),
        ("x+y=12", "12"),
        ("3+4=8", "8"),
        (r"\infty", r"-\infty"),
        ("inf", "5"),
        ("0.300000000000001", "0.3"),
        ("1 < x < 2", r"1 \le x < 2"),
        ("\\", "5"),
        ("}{", "5"),
        ("=", "5"),
    ],
)
def test_R12_unequal_things_are_not_equal(a, b):
    assert not math_equal(a, b) and not math_equal(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\sqrt{\frac{1}{n}}", r"\frac{1}{\sqrt{n}}"),
        ("sqrt(1/n)", "1/sqrt(n)"),
        (r"\frac{\sqrt{2}}{2}", "1/sqrt(2)"),
        (r"\ln(n^2)", r"2\ln(n)"),
        ("x^2+2x+1", "(x+1)^2"),
    ],
)
def test_R14_R16_equal_for_positive_variables_both_ways(a, b):
    assert math_equal(a, b) and math_equal(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("-1 + exp(16)", "e^{16}-1"),
        ("pi/2", r"\frac{\pi}{2}"),
        ("14.0 + -1.0i", "14-i"),
        ("sin(pi/6)", "0.5"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("ln(e^2)", "2"),
        ("3*sqrt(2)", r"3\sqrt{2}"),
        ("2x + 1", "1 + 2*x"),
        ("i^2", "-1"),
        ("2+3*i", "3i + 2"),
        ("abs(-3)", "3"),
        ("e^{i\\pi}", "-1"),
        ("exp(x+1)", "e \\cdot e^x"),
    ],
)
def test_R15_expressions_as_people_type_them(a, b):
    assert math_equal(a, b) and math_equal(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1,000", "1000"),
        ("10,000,000", "10000000"),
        ("7{,}000", "7000"),
        ("50%", "0.5"),
        (r"25\%", r"\frac{1}{4}"),
        ("\u22125", "-5"),
        ("0.5", r"\frac12"),
        (r"\dfrac{1}{2}", r"\tfrac{2}{4}"),
        (r"\$5", "5"),
        ("$5", "5"),
        ("(1, 2)", "(1,2)"),
        (r"\left(1,\, 2\right)", "(1,2)"),
        (r"\boxed{\boxed{3}}", "3"),
        ("5.", "5"),
        (r"3\frac{1}{2}", "3.5"),
        ("3 1/2", "7/2"),
        (r"5\text{ cm}", "5"),
        (r"90^\circ", "90"),
        ("x = 5", "5"),
        (r"x = 1 \text{ or } x = 2", "2, 1"),
        (r"\pm 2", "2, -2"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{bmatrix}1&2\end{bmatrix}"),
        ("0.333333", "1/3"),
        (r"2\cdot 10^5", "200000"),
        ("Yes", "yes"),
        ("\u00bd", "1/2"),
        ("3\u00bd", "3.5"),
        ("\u221a2", r"\sqrt{2}"),
        ("x\u00b2", "x^2"),
        (r"0.\overline{3}", "1/3"),
        ("5 apples", "5"),
        ("50 percent", "50%"),
        (r"\{-1, 1\}", r"\pm 1"),
        ("a=1, b=2", "b=2, a=1"),
        ("(x,y)=(2,3)", "(2, 3)"),
        ("3x+4y=12", "y = 3 - 3x/4"),
        (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"6.02 \times 10^{23}", "6.02e23"),
        ("2^{64}-1", "18446744073709551615"),
        (r"\frac{100!}{98!}", "9900"),
        ("1010_2", "10"),
        ("FF_{16}", "255"),
        (r"\log_2 8", "3"),
        ("infinity", r"\infty"),
        (r"(-inf, 3)", r"(-\infty, 3)"),
        (r"\emptyset", r"\varnothing"),
        (r"\{\}", "\u2205"),
        (r"2 > x > 1", "1 < x < 2"),
        (r"\sin 30^\circ", "1/2"),
        ("0.333...", "1/3"),
        ("0.1666...", "1/6"),
        (r"0.\dot{3}", "1/3"),
        ("0.(3)", "1/3"),
        ("3+4 = 7", "7"),
        ("x = 2+3 = 5", "5"),
        ("= 7", "7"),
        ("5 dollars", "$5"),
        (r"\{x \mid x>3\}", r"\{x | x > 3\}"),
        (r"\lvert -3 \rvert", "3"),
        (r"\frac 1 2", "0.5"),
        ("0.30000000000000004", "0.3"),
        ("2.0000000000000004", "2"),
    ],
)
def test_R18_the_same_answer_written_otherwise(a, b):
    assert math_equal(a, b) and math_equal(b, a)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The answer is 1,000.", 1000, 1),
        ("50%", 0.5, 1),
        ("50%", 50, 0),
        ("x = \u22125", -5, 1),
        (r"\boxed{\frac12}", "0.5", 1),
        ("It costs \\$1,234.50 in total", 1234.5, 1),
        ("1e3", 1000, 1),
        ("-3", 3, 0),
        ("I got 12, then 7", 7, 1),
        ("10-3 = 7", 7, 1),
        ("2-3", -3, 0),
        ("12", 1.2, 0),
        ("no number", 5, 0),
        ("", 5, 0),
        (r"\boxed{1} then \boxed{2}", 2, 1),
        (r"\boxed{1} then \boxed{2}", 1, 0),
    ],
)
def test_R18_numbers(text, answer, right):
    assert numeric(text, answer) == right


def test_R18_tolerance_is_asked_for_by_name():
    assert numeric("99", 100) == 0.0 and numeric("99", 100, relative=0.01) == 1.0 == numeric("99", 100, absolute=1)
    with pytest.raises(ValueError, match="not a number"):
        numeric("5", "five")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("(E)", "E"),
        ("E.", "E"),
        ("B) 12", "B"),
        ("**C. 12 apples**", "C"),
        ("The answer is (C).", "C"),
        ("A dog. The answer is B because A is wrong", "B"),
        ("A is wrong. The correct option is D", "D"),
        ("The answer isn't A, it's B", "B"),
        ("A) yes\nB) no\n\nB", "B"),
        ("I think a cat", None),
        ("the answer is A or B", None),
        ("Answer: b", "B"),
        ("<answer>C</answer>", "C"),
        ("C - because it rains", "C"),
        ("\u201cB\u201d", "B"),
        ("Both A and B", None),
        ("not A", None),
        ("The answer is not A but D", "D"),
        ("", None),
    ],
)
def test_R7_the_marked_choice_counts_and_letters_in_prose_do_not(text, answer):
    assert [multiple_choice(text, c) for c in "ABCDE"] == [float(c == answer) for c in "ABCDE"]


@pytest.mark.parametrize("text", ["9^{9^{9^{9}}}", "100000!", "2^{10000000}", "10^{10^{10}}"])
def test_R20_what_would_fill_the_machine_is_not_evaluated(text):
    start = time.monotonic()
    assert not math_equal(text, "7") and math_equal(text, text)
    assert time.monotonic() - start < 20
