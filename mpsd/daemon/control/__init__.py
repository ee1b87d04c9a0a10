"""One control daemon: started or adopted, proved, watched, drained and restarted."""
