"""Updates low-precision weights in fp32, with halfstep's own updates or with an optimizer's own `step` on masters."""
