"""What is written down, not computed: titles, colours, the paper's and the notebook's numbers, settings of agents.

Colours are Okabe and Ito's palette, safe for the colour-blind. Of the agents' settings, "tuned" of badam, badam-map,
bbb and vadam were found by a random search on problems that are not in the tables, with seeds 7001 and 7002, the shared
ones chosen on the benchmark's problems with other seeds than those of the tables (1001 to 1003, and 7000). "paper" is
the paper's appendix; what it leaves open (noise, dropout rate) is the Showdown's, Badam's prior the released code's,
whose `sigma_prior=0.1` is a standard deviation, and Vadam's three were searched on problems that are not in its table.
The means of bbb-showdown start with the standard deviation .05; other settings than these are not the Showdown's.
"""

import json
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
TITLES: dict[str, str] = FACTS["titles"]
COLOURS: dict[str, str] = FACTS["colours"]
