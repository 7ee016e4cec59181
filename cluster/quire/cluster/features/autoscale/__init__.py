"""Autoscaling: how many groups and gateways there should be.

Its modules:

    settings                      what an operator sets
    policy, serve                 the number of groups, and how Ray Serve asks for it
    gateways                      the number of gateways
    demand, report_demand         requests that wait because there is no group
"""
