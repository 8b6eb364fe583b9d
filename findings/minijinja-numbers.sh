#!/usr/bin/env bash
# minijinja 3.1.0, in which several inference servers render chat templates, writes some numbers otherwise than Jinja: floats that Python
# writes with an exponent are written out, and in JSON exponents have one digit, so the same tool call is other tokens. A string is no
# sequence, text that is no number has no integer (Jinja: 0), and strings have no operator %.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q minijinja==3.1.0 jinja2==3.1.6
cat >compare.py <<'PYTHON'
import jinja2
import minijinja

values = {"text": "ab", "list": [1], "large": 1e20, "small": 1e-7, "half": 2.5}
for template in (
    "{{ half }} {{ text.upper() }} {{ list is sequence }}",
    "{{ large }} {{ small }}",
    "{{ [large, small]|tojson }}",
    "{{ text is sequence }} {{ text is iterable }}",
    "{{ text|int }}",
    "{{ 'call_%d' % 3 }}",
):
    answers = []
    for render in (jinja2.Environment().from_string(template).render, lambda **all: minijinja.Environment().render_str(template, **all)):
        try:
            answers.append(render(**values))
        except Exception as error:
            answers.append(type(error).__name__)
    print(template, "->", " and ".join(dict.fromkeys(answers)))
PYTHON
found=$(venv/bin/python compare.py)
wanted=$(cat <<'WANTED'
{{ half }} {{ text.upper() }} {{ list is sequence }} -> 2.5 AB True
{{ large }} {{ small }} -> 1e+20 1e-07 and 100000000000000000000.0 0.0000001
{{ [large, small]|tojson }} -> [1e+20, 1e-07] and [1e+20, 1e-7]
{{ text is sequence }} {{ text is iterable }} -> True True and False True
{{ text|int }} -> 0 and TemplateError
{{ 'call_%d' % 3 }} -> call_3 and TemplateError
WANTED
)
echo "Jinja 3.1.6 and minijinja 3.1.0, where they differ:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
