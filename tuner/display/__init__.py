"""Results and progress for people: text, HTML, figures and exports."""
