"""Plans as people see them: tables, explanations, charts and pages, without logic of their own."""
