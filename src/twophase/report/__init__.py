"""Reports: what a run or a sweep has to show, as one HTML file that needs nothing else. No torch."""
