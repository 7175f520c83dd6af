"""From numbers to a code, a sentence, evidence and advice."""
