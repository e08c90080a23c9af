"""Language models as judges: scores, rubrics and verdicts on steps."""
