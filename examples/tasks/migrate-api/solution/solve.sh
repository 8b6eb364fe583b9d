#!/bin/bash
set -e
cd /workspace
sed -i 's/from .pricing import total/from .pricing import quote/; s/return total(self.items, 0, currency)/return quote(self.items, currency=currency)/' shop/cart.py
sed -i 's/import total as price_of/import quote as price_of/; s/pricing.total(cart.items, discount, "EUR")/pricing.quote(cart.items, discount=discount, currency="EUR")/' shop/invoice.py
python3 - <<'PY'
import re
text = open("shop/export.py").read()
text = text.replace('in_dollars = functools.partial(p.total, currency="USD")', 'in_dollars = functools.partial(p.quote, currency="USD")')
text = text.replace("in_dollars(cart.items, discount)", "in_dollars(cart.items, discount=discount)")
text = text.replace('getattr(p, "total")(items, 5, "GBP")', 'p.quote(items, discount=5, currency="GBP")')
text = re.sub(r'p\.total\(items, (\d+), "CHF"\)', r'p.quote(items, discount=\1, currency="CHF")', text)
open("shop/export.py", "w").write(text)
text = open("shop/pricing.py").read()
text = re.sub(r"def total\(.*?(?=def quote)", "", text, flags=re.S)
open("shop/pricing.py", "w").write(text)
PY
python3 -m unittest
