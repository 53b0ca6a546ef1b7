"""Shows plans to people, as tables, explanations, charts and pages, without logic of its own."""
