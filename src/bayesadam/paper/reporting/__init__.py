"""The report's parts: finished runs, the paper's claims, tables, charts, and the page that holds them."""
